"""Gives the kernel the names of Python's threads, as Python 3.14 does itself. For `benchmarks.cpu` alone (Linux)."""

import threading
from pathlib import Path

_run = threading.Thread.run


def _named_run(self: threading.Thread) -> None:
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self.name[:15])
    _run(self)


threading.Thread.run = _named_run  # type: ignore[method-assign]
