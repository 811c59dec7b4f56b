"""What `slotline up` shows: its own lines, and those of its children with their name before."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from rich.console import Console
from rich.text import Text

COLOURS = {"web": "cyan", "worker": "green"}

WIDTH = 6


class Terminal:
    """Writes whole lines, from any thread. A terminal that has gone away is no error."""

    def __init__(self) -> None:
        # No guesses about numbers and paths, no wrapping: lines stay as they are, for grep too.
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._lock = threading.Lock()

    def say(self, text: str = "", style: str = "") -> None:
        """A line of `up` itself."""
        self._write(Text(text, style=style))

    def relay(self, name: str, line: str) -> None:
        """A line of a child."""
        self._write(Text.assemble((f"{name:{WIDTH}} | ", COLOURS.get(name, "")), line))

    def _write(self, text: Text) -> None:
        with self._lock, suppress(OSError, ValueError):
            self._console.print(text)
