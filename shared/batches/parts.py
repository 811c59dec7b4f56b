"""From rows to the immutable parts of a batch's results.

A part is in the storage before it is committed, and committed before the jobs of its lines are discarded. Whoever dies
in between leaves an object that nobody knows of, or jobs that the next holder of the lease finds marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.batches.feeding import Feed
from shared.batches.records import BatchRecord, Usage
from shared.batches.rows import Row
from shared.batches.store import BatchStore, Part
from shared.files import FileStore
from shared.settings import BatchSettings
from shared.stream import dumps

#: Rows of this size are written at once.
PART_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class Draft:
    """Rows on their way out: at most one object of each kind. `to_put` are those that are not in the storage yet."""

    rows: Sequence[Row]
    parts: Sequence[Part]
    to_put: list[tuple[Part, bytes]]

    @property
    def usage(self) -> Usage:
        """Tokens of all rows."""
        used = [row.usage for row in self.rows]
        return Usage(*(sum(getattr(usage, name) for usage in used) for name in Usage.__slots__))

    @property
    def job_ids(self) -> list[str]:
        """What can be discarded once the rows are known."""
        return [job_id for row in self.rows for job_id in row.job_ids]


class Results:
    """Collects rows of one batch and writes them as parts, for one holder of its lease. One thread only.

    A method that raises has lost nothing and can be called again; rows that wait are kept meanwhile.

    Args:
        batches, files, settings: where parts go, and their limits.
        feed: of the batch's jobs.
        batch_id: the batch.
        fence: of the lease; it makes the names of parts unique.
        leftovers: jobs of lines that have a row already.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        settings: BatchSettings,
        feed: Feed,
        batch_id: str,
        fence: int,
        leftovers: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batches = batches
        self._files = files
        self._settings = settings
        self._feed = feed
        self._batch_id = batch_id
        self._fence = fence
        self._clock = clock
        self._rows: list[Row] = []
        self._bytes = 0
        self._since = 0.0
        self._draft: Draft | None = None
        self._count = 0
        self._leftovers = list(leftovers)

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows to be written when they are due."""
        if rows and not self._rows:
            self._since = self._clock()
        self._rows += rows
        self._bytes += sum(len(row.data) for row in rows)

    @property
    def is_full(self) -> bool:
        """Whether no more rows should be made until some are written."""
        return self._draft is not None or self._is_large

    @property
    def _is_large(self) -> bool:
        return len(self._rows) >= self._settings.batch_part_lines or self._bytes >= PART_BYTES

    @property
    def is_written(self) -> bool:
        """Whether every row is committed."""
        return not self._rows and self._draft is None

    @property
    def has_leftovers(self) -> bool:
        """Whether jobs of committed lines are still to be discarded."""
        return bool(self._leftovers)

    def write(self, now: bool = False) -> bool:
        """Write and commit the rows if they are many, large or old, or `now`; True if a part was committed.

        Raises:
            StorageUnavailable: they are kept.
            LeaseLost: somebody else runs the batch now.
        """
        wrote = False
        while self._draft or self._is_large or (self._rows and (now or self._is_late)):
            self._write_one()
            wrote = True
        return wrote

    @property
    def _is_late(self) -> bool:
        return self._clock() - self._since >= self._settings.batch_part_s

    def _write_one(self) -> None:
        draft = self._draft = self._draft or self._next_draft()
        while draft.to_put:
            part, data = draft.to_put[0]
            self._files.put(part.name, data)
            # Never again from here on: `put` marks it as known to nobody, and by then it may have been committed.
            del draft.to_put[0]
        self._feed.mark(draft.job_ids)
        self._batches.commit_part(self._batch_id, self._fence, draft.parts, draft.usage)
        self._leftovers += draft.job_ids
        self._draft = None

    def _next_draft(self) -> Draft:
        """The oldest rows, as many as one part may have."""
        limit = self._settings.batch_part_lines
        rows, self._rows = self._rows[:limit], self._rows[limit:]
        self._bytes = sum(len(row.data) for row in self._rows)
        self._since = self._clock()
        self._count += 1
        kinds = {which: [row for row in rows if row.which == which] for which in ("output", "error")}
        to_put = [self._part(which, some) for which, some in kinds.items() if some]
        return Draft(rows, [part for part, _ in to_put], to_put)

    def _part(self, which: Any, rows: Sequence[Row]) -> tuple[Part, bytes]:
        data = b"".join(row.data for row in rows)
        name = f"batches/{self._batch_id}/{self._fence:06d}-{self._count:06d}.{which}.jsonl"
        return Part(which, name, [row.number for row in rows], len(data)), data

    def discard(self) -> None:
        """Remove what is left of the jobs whose lines are committed; what their worker still holds waits."""
        if self._leftovers:
            self._leftovers = self._feed.discard(self._leftovers)


def put_manifest(files: FileStore, batch: BatchRecord, keep_s: float) -> None:
    """List a batch's parts in `manifest.json` beside them, for whoever reads the storage itself.

    Raises:
        StorageUnavailable: the last one stands as it was.
    """

    def listed(file_id: str | None) -> dict[str, Any]:
        return {"file_id": file_id, "parts": files.parts(file_id) if file_id else []}

    manifest = {
        "batch_id": batch.id,
        "status": batch.status,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "output": listed(batch.output_file_id),
        "error": listed(batch.error_file_id),
    }
    files.put(f"batches/{batch.id}/manifest.json", dumps(manifest).encode() + b"\n", keep_s)
