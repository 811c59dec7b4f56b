"""Writes rows so that no crash loses, doubles or tears one, and finds those of an earlier start again."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from slotline.batch.index import LineIndex
from slotline.batch.lines import content_hash
from slotline.batch.manifest import Refused
from slotline.batch.rows import encode, own_part

Order = Literal["finished", "input"]

STDOUT = "-"

#: Rows reach the file after so many, or so long.
FLUSH_ROWS, FLUSH_S = 100, 1.0


def unsorted_path(out: Path) -> Path:
    """Where rows are collected that will be in the input's order at the end."""
    return out.with_name(out.name + ".unsorted")


def draft_path(path: Path) -> Path:
    """Where a file is written that takes the place of another at once."""
    return path.with_name(path.name + ".new")


class Output:
    """The rows of one run. Use it in a `with` block: leaving it, in whatever way, forces them to disk.

    In the order of the input they are collected beside the output, and put in order when the block is left; the
    collection goes once `complete` has been called.

    Args:
        out: the file, or `-` for standard output.
        errors: where the rows of failed lines go instead.
    """

    def __init__(self, out: str, errors: Path | None, order: Order, index: LineIndex) -> None:
        self._out = None if out == STDOUT else Path(out)
        self._errors_path = errors
        self._sorted = order == "input"
        self._index = index
        self._files = ExitStack()
        self._rows: IO[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = 0
        self._flushed_at = time.monotonic()
        self._complete = False

    def resume(self) -> int:
        """Take stock of what an earlier start has written; returns the number of failed lines, which will run again.

        A torn last row is cut off, and the rows of failed lines are taken out. A kill in between changes nothing.

        Raises:
            Refused: there are rows that are not this run's.
        """
        assert self._out is not None, "standard output cannot be resumed"
        path = unsorted_path(self._out)
        if not self._sorted:
            path = self._out
        elif not path.exists() and self._out.exists():
            self._out.rename(path)
        failed = self._take_stock(path) if path.exists() else 0
        if self._errors_path is not None and self._errors_path.exists():
            failed += sum(1 for _ in rows_in(self._errors_path))
            os.truncate(self._errors_path, 0)
        return failed

    def __enter__(self) -> Self:
        if self._out is None:
            self._rows = self._files.enter_context(tempfile.TemporaryFile()) if self._sorted else _stdout()
        else:
            path = unsorted_path(self._out) if self._sorted else self._out
            self._rows = self._files.enter_context(path.open("ab"))
        if self._errors_path is not None:
            self._errors = self._files.enter_context(self._errors_path.open("ab"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._files:
            self.flush()
            for file in (self._rows, self._errors):
                if file is not None and (self._out is not None or file is not self._rows):
                    os.fsync(file.fileno())
            if self._sorted:
                self._put_in_order()

    def write(self, row: dict[str, Any], *, failed: bool) -> None:
        """Add a row."""
        file = self._errors if failed and self._errors is not None else self._rows
        assert file is not None
        file.write(encode(row))
        self._pending += 1
        if self._pending >= FLUSH_ROWS:
            self.flush()

    def tick(self) -> None:
        """Let rows that have waited long enough reach the file; to be called often."""
        if self._pending and time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand every row to the system: only the machine's end could lose it now."""
        for file in (self._rows, self._errors):
            if file is not None:
                file.flush()
        self._pending, self._flushed_at = 0, time.monotonic()

    def complete(self) -> None:
        """Say that every line has its row."""
        self._complete = True

    def _take_stock(self, path: Path) -> int:
        failed, end = 0, 0
        for row, size in rows_in(path):
            end += size
            if _is_failed(row):
                failed += 1
            elif not self._index.add_done(self._line_of(row), content_hash(own_part(row)) if "line" in row else b""):
                raise Refused(f"{path} has two rows for one line: {_name(row)}")
        if end < path.stat().st_size:
            os.truncate(path, end)
        if failed:
            _rewrite(path, lambda row: not _is_failed(row))
        return failed

    def _line_of(self, row: dict[str, Any]) -> int:
        line = row.get("line") if "line" in row else self._index.line_of(str(row.get("custom_id")))
        if not isinstance(line, int):
            raise Refused(f"there is a row that belongs to no line of the input: {_name(row)}")
        return line

    def _put_in_order(self) -> None:
        assert self._rows is not None
        source: IO[bytes] = self._rows
        if self._out is None:
            self._copy_sorted(source, _stdout())
            _stdout().flush()
            return
        draft = draft_path(self._out)
        with unsorted_path(self._out).open("rb") as source, draft.open("wb") as target:
            self._copy_sorted(source, target)
            target.flush()
            os.fsync(target.fileno())
        draft.replace(self._out)
        if self._complete:
            unsorted_path(self._out).unlink()

    def _copy_sorted(self, source: IO[bytes], target: IO[bytes]) -> None:
        source.seek(0)
        place = 0
        for raw in source:
            self._index.add_place(self._line_of(json.loads(raw)), place)
            place += len(raw)
        for place in self._index.places():
            source.seek(place)
            target.write(source.readline())


def _stdout() -> IO[bytes]:
    if sys.stdout is None:
        raise OSError("standard output is closed")
    return sys.stdout.buffer


def rows_in(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows of a file with their sizes in bytes; a torn last one is left out.

    Raises:
        Refused: a line before the last is no row.
    """
    torn: int | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if torn is not None:
                raise Refused(f"{path} line {torn} is not a row of a batch: was it edited? --overwrite begins anew")
            row = _row(raw)
            if row is None:
                torn = number
            else:
                yield row, len(raw)


def _row(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        row = json.loads(raw)
    except ValueError:
        return None
    return row if isinstance(row, dict) and ("line" in row or "custom_id" in row) else None


def _is_failed(row: dict[str, Any]) -> bool:
    if "line" in row:
        return row.get("error") is not None
    response = row.get("response")
    return row.get("error") is not None or not isinstance(response, dict) or response.get("status_code") != 200


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Leave only some rows in a file; readers see the old or the new one."""
    draft = draft_path(path)
    with path.open("rb") as source, draft.open("wb") as target:
        for raw in source:
            if keep(json.loads(raw)):
                target.write(raw)
        target.flush()
        os.fsync(target.fileno())
    shutil.copymode(path, draft)
    draft.replace(path)


def _name(row: dict[str, Any]) -> str:
    return f"custom_id {row['custom_id']!r}" if "line" not in row else f"line {row['line']!r}"
