"""One run of a load generator as a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_command(script: Path | None) -> list[str]:
    """How the load generator is called: ours, or a script that takes the same options and prints the same figures."""
    return [sys.executable, str(script)] if script else [sys.executable, "-m", "benchmarks.load"]


class LoadRun:
    """Sends load to one server."""

    def __init__(self, command: Sequence[str], url: str) -> None:
        self._command = [*command, url]

    def __call__(self, flags: Sequence[str]) -> dict[str, Any]:
        """Run it. Returns its figures and `cpu_s`, the CPU time it used.

        Raises:
            RuntimeError: a request failed.
        """
        before = _children_s()
        done = subprocess.run([*self._command, *flags], stdout=subprocess.PIPE, check=True, text=True)
        figures: dict[str, Any] = json.loads(done.stdout)
        if figures["errors"]:
            raise RuntimeError(f"{figures['errors']} requests failed: {figures['first_error']}")
        return figures | {"cpu_s": _children_s() - before}


def _children_s() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
