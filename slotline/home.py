"""Where `slotline up` keeps its data, and how the other commands find a running one.

The client comes without platformdirs, so the two platforms it runs on are spelled out here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"

STATE_FILE = "up.json"


def data_dir() -> Path:
    """`SLOTLINE_DATA_DIR`, else the user's data directory of this platform."""
    if given := os.environ.get("SLOTLINE_DATA_DIR"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "slotline"
    base = os.environ.get("XDG_DATA_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".local" / "share") / "slotline"


def read_state(directory: Path) -> dict[str, Any] | None:
    """What the last `slotline up` wrote there, if it is readable; it may be dead by now."""
    try:
        state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def running_state(directory: Path | None = None) -> dict[str, Any] | None:
    """The state of a running `slotline up`; None if there is none.

    A process id that has been given to another program since can fool it; the URL then refuses connections.
    """
    state = read_state(directory or data_dir())
    return state if state is not None and _lives(state.get("pid")) else None


def named_url() -> str | None:
    """`SLOTLINE_URL`, if it is set."""
    return os.environ.get("SLOTLINE_URL") or None


def default_url() -> str:
    """The server to talk to: `SLOTLINE_URL`, else a running `slotline up`, else port 8000 of this machine."""
    if given := named_url():
        return given
    state = running_state() or {}
    return str(state.get("url") or DEFAULT_URL)


def _lives(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
