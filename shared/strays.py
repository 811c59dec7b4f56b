"""Ends what RQ's own tools leave without an end.

`job.cancel()`, `job.delete()` and `rq empty` write no event, tell no reader and leave jobs that wait for the job where
they are. Running jobs are found by their worker. Those that waited are found here, by looking at RQ's registries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rq.registry import CanceledJobRegistry, DeferredJobRegistry

from shared.jobs import JobStore
from shared.lua import script
from shared.names import SERIALIZER, events_key, job_key
from shared.records import job_object
from shared.stream import dumps

log = logging.getLogger(__name__)

#: What was cancelled this long ago or less is looked at every time, everything else in turn.
RECENT_S = 60
#: Entries of a registry that are looked at at a time.
STRETCH = 1000

ENDED_BADLY = (b"failed", b"canceled", b"stopped")


class Strays:
    """Looks at the registries of some queues, a stretch at a time. One thread only.

    Every method raises redis-py's own errors when Redis cannot be reached, and may then be called again.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._client: Any = store.client
        self._mourn = script(store.client, "mourn")
        self._places: dict[str, int] = {}
        self._turn = 0
        self._suspects: set[str] = set()

    @property
    def is_unsure(self) -> bool:
        """Whether there is something that somebody else may be about to settle. If not by the next time, nobody is."""
        return bool(self._suspects)

    def settle(self, queues: Sequence[str]) -> None:
        """Go round once: everything that is likely to need an end, and of the rest of one queue the next stretch."""
        suspects: set[str] = set()
        for turn, queue in enumerate(queues):
            registry = CanceledJobRegistry(queue, self._client, serializer=SERIALIZER).key
            cancelled = self._client.zrange(registry, time.time() - RECENT_S, "+inf", byscore=True)
            if turn == self._turn % len(queues):
                cancelled += self._stretch(registry)
            suspects |= self._end_cancelled(registry, cancelled)
            suspects |= self._end_deferred(
                self._stretch(DeferredJobRegistry(queue, self._client, serializer=SERIALIZER).key)
            )
        self._turn += 1
        self._suspects = suspects

    def _stretch(self, key: str) -> list[bytes]:
        """The next entries of a registry; after the last ones it begins again."""
        self._places[key], entries = self._client.zscan(key, self._places.get(key, 0), count=STRETCH)
        return [job_id for job_id, _ in entries]

    # --- cancelled ---

    def _end_cancelled(self, registry: str, ids: Iterable[bytes]) -> set[str]:
        """End what has none. Returns the jobs that a worker may be about to end."""
        names = sorted({job_id.decode() for job_id in ids})
        gone, suspects = [], set()
        fields = self._fields(names, "status", "sl_end", "sl_exec")
        for job_id, (status, end, execution) in zip(names, fields, strict=True):
            if status is None:
                gone.append(job_id)  # RQ never takes anything out of this registry
            elif status == b"canceled" and end is None:
                if execution is None or job_id in self._suspects:
                    self._end(job_id)
                else:
                    suspects.add(job_id)
        if gone:
            self._client.zrem(registry, *gone)
        return suspects

    def _end(self, job_id: str) -> None:
        (record,) = self._store.fetch_many([job_id])
        if record is None or record.end is not None:
            return
        said, ended_at = self._store.said(record), record.ended_at or time.time()
        ttl_s = record.result_ttl_s or self._store.settings.result_ttl_s
        final = job_object(
            record,
            status="cancelled",
            ended_at=ended_at,
            ttl_s=ttl_s if ttl_s > 0 else None,
            **said.answer,
            finish_reason="cancelled",
        )
        if self._mourn(keys=[job_key(job_id), events_key(job_id)], args=[job_id, dumps(final), ttl_s, said.tokens]):
            log.info("job %s was cancelled with RQ's own tools", job_id)
            self._store.end_dependents(job_id)

    # --- deferred ---

    def _end_deferred(self, ids: Sequence[bytes]) -> set[str]:
        """End what waits for a job that can no longer complete.

        Returns the jobs that have nothing left to wait for, part of which is gone. RQ starts a job when the last one
        that it waits for completes, so one like that will never start, unless RQ is just about to do so.
        """
        names = [job_id.decode() for job_id in ids]
        suspects = set()
        for record, dependencies in zip(self._store.fetch_many(names), self._dependencies(names), strict=True):
            if record is None or record.rq_status != "deferred" or record.fingerprint is None:
                continue  # what RQ's users have made to wait, RQ lets wait
            failed = next((i for i, status in dependencies.items() if status in ENDED_BADLY), None)
            lost = next((i for i, status in dependencies.items() if status is None), None)
            if failed is not None:
                self._store.end_dependent(record, failed)
            elif lost is not None and set(dependencies.values()) <= {None, b"finished"}:
                if record.id in self._suspects:
                    self._store.end_dependent(record, lost)
                else:
                    suspects.add(record.id)
        return suspects

    def _dependencies(self, ids: Sequence[str]) -> list[dict[str, bytes | None]]:
        """For each job the status of each one that it waits for, None for one that is gone."""
        pipe = self._client.pipeline(transaction=False)
        for job_id in ids:
            pipe.smembers(f"rq:job::{job_id}:dependencies")  # RQ writes two colons here
        waited_for = [sorted(dependency.decode() for dependency in found) for found in pipe.execute()]
        every = sorted({dependency for found in waited_for for dependency in found})
        status = {i: fields[0] for i, fields in zip(every, self._fields(every, "status"), strict=True)}
        return [{dependency: status[dependency] for dependency in found} for found in waited_for]

    def _fields(self, ids: Sequence[str], *names: str) -> list[list[bytes | None]]:
        pipe = self._client.pipeline(transaction=False)
        for job_id in ids:
            pipe.hmget(job_key(job_id), *names)
        replies: list[list[bytes | None]] = pipe.execute()
        return replies
