"""Reading batches: their records, those that are open, the list of all, the lines that are through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from shared.batches.records import BatchRecord, Lines
from shared.errors import BatchNotFound
from shared.names import BATCHES, OPEN_BATCHES, batch_done_key, batch_key
from shared.paging import pages


class BatchReader:
    """All that changes nothing. Safe to share between threads."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one

    def get(self, batch_id: str) -> BatchRecord:
        """The stored batch.

        Raises:
            BatchNotFound: there is none.
        """
        raw = self.client.hgetall(batch_key(batch_id))
        if not raw:
            raise BatchNotFound(batch_id)
        return BatchRecord.parse(batch_id, raw)

    def get_many(self, batch_ids: Sequence[str]) -> list[BatchRecord | None]:
        """The stored batches, None for each that is gone, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipe.hgetall(batch_key(batch_id))
        found = zip(batch_ids, pipe.execute(), strict=True)
        return [BatchRecord.parse(batch_id, raw) if raw else None for batch_id, raw in found]

    def open_batches(self) -> list[BatchRecord]:
        """The batches that somebody has work with, paused ones too, oldest first."""
        ids = [raw.decode() for raw in self.client.smembers(OPEN_BATCHES)]
        return sorted((b for b in self.get_many(ids) if b is not None), key=lambda b: (b.created_at, b.id))

    def newest(self, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """At most `limit` batches, newest first, those older than the batch `after`; and whether there are more.

        Raises:
            KeyError: `after` is not in the list.
        """
        found: list[BatchRecord] = []
        for ids in pages(self.client, BATCHES, after):
            found += [batch for batch in self.get_many(ids) if batch is not None]
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def done_lines(self, batch_id: str) -> Lines:
        """The lines that have a row in the results, completed or failed."""
        return Lines(self.client.get(batch_done_key(batch_id)) or b"")
