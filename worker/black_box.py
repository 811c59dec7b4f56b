"""What a model process was at when it died: a little memory that it shares with its parent.

Redis is told of a job's start a moment after it, which is too late where the process dies of that start. Writing here
takes no system call, and what was written outlives the writer. Each place has one writer, so there are no locks; an
entry that was being written when the process died is that of no job.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

#: The places of the slots come first, then those of a request that is being prepared, and of one on its way to a slot.
MOST_SLOTS = 256
INTAKE = MOST_SLOTS
ADMISSION = MOST_SLOTS + 1

_TICKS = struct.Struct("<Q")
_NAME_BYTES = 512
_ENTRY_BYTES = 64
_ENTRIES_AT = _TICKS.size + _NAME_BYTES
_SIZE = _ENTRIES_AT + (ADMISSION + 1) * _ENTRY_BYTES


class BlackBox:
    """The name of a worker, how often its engine has gone round, and the executions it works on.

    The model process writes and its parent reads.

    Attributes:
        file: the descriptor to pass to the writer; None for a box of this process alone.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = file
        self._memory = mmap.mmap(-1 if file is None else file, _SIZE)

    @classmethod
    def to_share(cls) -> BlackBox:
        """An empty one in a file without a name; its descriptor lives as long as this process."""
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("slotline")
        else:
            with tempfile.TemporaryFile() as temporary:
                file = os.dup(temporary.fileno())
        os.ftruncate(file, _SIZE)
        return cls(file)

    # --- the writer's side ---

    def sign(self, name: str) -> None:
        """Say which worker this is."""
        self._write(_TICKS.size, _NAME_BYTES, name)

    def tick(self) -> None:
        """Count one round of the engine."""
        self._set_ticks(self.ticks + 1)

    def rest(self) -> None:
        """Say that the engine goes round no more, and should not."""
        self._set_ticks(0)

    def enter(self, place: int, execution: str) -> None:
        """Note what a place works on from now on."""
        self._write(_entry(place), _ENTRY_BYTES, execution)

    def leave(self, place: int) -> None:
        """Note that a place works on nothing."""
        self._write(_entry(place), _ENTRY_BYTES, "")

    @contextmanager
    def working_on(self, place: int, execution: str) -> Iterator[None]:
        """Note what a place works on meanwhile."""
        self.enter(place, execution)
        try:
            yield
        finally:
            self.leave(place)

    # --- the reader's side ---

    @property
    def name(self) -> str:
        """Which worker wrote; empty before it has signed."""
        return self._read(_TICKS.size, _NAME_BYTES)

    @property
    def ticks(self) -> int:
        """Rounds of the engine; 0 while it is not going round."""
        return int(_TICKS.unpack_from(self._memory)[0])

    @property
    def executions(self) -> list[str]:
        """What the process works on, or worked on when it died."""
        found = (self._read(_entry(place), _ENTRY_BYTES) for place in range(ADMISSION + 1))
        return sorted({execution for execution in found if execution})

    def clear(self) -> None:
        """Forget everything, for the next writer."""
        self._memory[:] = bytes(_SIZE)

    def _set_ticks(self, ticks: int) -> None:
        _TICKS.pack_into(self._memory, 0, ticks)

    def _write(self, at: int, size: int, text: str) -> None:
        self._memory[at : at + size] = text.encode()[:size].ljust(size, b"\0")

    def _read(self, at: int, size: int) -> str:
        return self._memory[at : at + size].rstrip(b"\0").decode(errors="replace")


def _entry(place: int) -> int:
    return _ENTRIES_AT + place * _ENTRY_BYTES
