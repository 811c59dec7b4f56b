"""How this very command can be typed again."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Container
from pathlib import Path


def program() -> str:
    """What to type for `slotline` here, as a shell reads it."""
    script = Path(sys.argv[0])
    if script.name != "slotline":
        return f"{shlex.quote(sys.executable)} -m slotline"
    found = shutil.which("slotline")
    return "slotline" if found and Path(found).resolve() == script.resolve() else shlex.quote(str(script))


def again(without: Container[str] = ()) -> str:
    """The command that is running, less some of its flags."""
    return shlex.join([*shlex.split(program()), *(word for word in sys.argv[1:] if word not in without)])
