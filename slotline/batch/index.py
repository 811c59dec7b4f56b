"""Which line is which, and which are done, in a temporary file: memory does not grow with the input."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from types import TracebackType
from typing import Self

#: KiB of pages held in memory; the rest lies in a file that vanishes with us.
CACHE_KIB = 256


class LineIndex:
    """The ids and the finished lines of one run. Use it in a `with` block, from one thread."""

    def __init__(self) -> None:
        # An empty name is a private database on disk that SQLite removes itself.
        self._db = sqlite3.connect("", isolation_level=None)
        for setting in (f"cache_size=-{CACHE_KIB}", "journal_mode=OFF", "synchronous=OFF", "temp_store=FILE"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute("CREATE TABLE ids (custom_id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID")
        self._db.execute("CREATE TABLE done (line INTEGER PRIMARY KEY, content BLOB)")
        self._db.execute("CREATE TABLE places (line INTEGER PRIMARY KEY, place INTEGER)")
        self._db.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def add_id(self, custom_id: str, line: int) -> int | None:
        """Note whose an id is; returns the earlier line that has it, if one has."""
        added = self._db.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (custom_id, line))
        return None if added.rowcount else self.line_of(custom_id)

    def line_of(self, custom_id: str) -> int | None:
        """The line that has this id."""
        found = self._db.execute("SELECT line FROM ids WHERE custom_id = ?", (custom_id,)).fetchone()
        return found[0] if found else None

    def add_done(self, line: int, content: bytes = b"") -> bool:
        """Note that a line has its row, and the hash of its content; False if it had one already."""
        return bool(self._db.execute("INSERT OR IGNORE INTO done VALUES (?, ?)", (line, content)).rowcount)

    def done(self, line: int) -> bytes | None:
        """The hash that a finished line was noted with; None for one that is not finished."""
        found = self._db.execute("SELECT content FROM done WHERE line = ?", (line,)).fetchone()
        return found[0] if found else None

    def done_count(self, last: int) -> int:
        """Number of finished lines up to this one."""
        return int(self._db.execute("SELECT count(*) FROM done WHERE line <= ?", (last,)).fetchone()[0])

    def add_place(self, line: int, place: int) -> None:
        """Note where in a file the row of a line begins."""
        self._db.execute("INSERT OR REPLACE INTO places VALUES (?, ?)", (line, place))

    def places(self) -> Iterator[int]:
        """Where the rows begin, in the order of the lines."""
        for (place,) in self._db.execute("SELECT place FROM places ORDER BY line"):
            yield place
