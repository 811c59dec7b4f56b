"""Ends jobs that have waited longer than their `queue_timeout_s`, whether or not any worker lives.

Each such job is in a sorted set by the second at which it may have waited too long. Whoever looks at the set then, a
worker or a web process, finds out from the job's record what holds, and puts it off or fails it.
"""

from __future__ import annotations

import logging
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rq.job import Job
from rq.queue import Queue
from rq.registry import FailedJobRegistry, ScheduledJobRegistry
from rq.results import Result
from rq.utils import now, utcformat

from shared.errors import QueueTimeout
from shared.jobs import JobStore, queue_timeout_of
from shared.lua import script
from shared.names import DEADLINES, SERIALIZER, events_key, job_key, rq_queue_key
from shared.records import JobRecord, job_object
from shared.stream import dumps

log = logging.getLogger(__name__)

#: How soon a job is looked at again that a worker has taken and not yet begun.
LOOK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """A job at one look: when it was queued, as RQ wrote it; whether it has a log; and, read last, its record."""

    job_id: str
    queued: bytes
    has_log: bool
    record: JobRecord | None


class Deadlines:
    """Jobs that may wait only so long. Safe to share between threads.

    Every method raises redis-py's own errors when Redis cannot be reached, and may then be called again.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._client = store.client
        self._expire = script(store.client, "expire")

    def expire(self, limit: int = 100) -> list[str]:
        """Fail those of the jobs whose time may be up, at most `limit` of them, that have waited too long.

        Returns their ids. Jobs that wait for one of them end with it.
        """
        moment = now().timestamp()
        ids = [i.decode() for i in self._client.zrange(DEADLINES, "-inf", moment, byscore=True, offset=0, num=limit)]
        if not ids:
            return []
        return [seen.job_id for seen in self._look_at(ids) if self._settle(seen, moment)]

    def _look_at(self, ids: Sequence[str]) -> Iterator[_Seen]:
        pipe = self._client.pipeline(transaction=False)
        for job_id in ids:
            pipe.hget(job_key(job_id), "enqueued_at")
            pipe.exists(events_key(job_id))
        replies = pipe.execute()
        for job_id, queued, has_log, record in zip(
            ids, replies[::2], replies[1::2], self._store.fetch_many(ids), strict=True
        ):
            yield _Seen(job_id, queued or b"", bool(has_log), record)

    def _settle(self, seen: _Seen, moment: float) -> bool:
        """Put a job off, or fail it and return True."""
        record = seen.record
        limit_s = None if record is None else queue_timeout_of(record)
        # One that has had a slot has not come too late. A log of an earlier life says nothing.
        if record is None or limit_s is None or record.is_over or (seen.has_log and record.end is None):
            self._client.zrem(DEADLINES, seen.job_id)
            return False
        at = self._deadline(record, limit_s, moment)
        if at > moment:
            self._client.zadd(DEADLINES, {record.id: at}, xx=True)
            return False
        return self._fail(record, limit_s, seen.queued)

    def _deadline(self, record: JobRecord, limit_s: float, moment: float) -> float:
        """When a job has waited too long, or has to be looked at again to find out."""
        match record.rq_status:
            case "queued":
                since = record.enqueued_at or record.created_at
            case "scheduled":
                registry = ScheduledJobRegistry(record.origin, self._client, serializer=SERIALIZER)
                since = self._client.zscore(registry.key, record.id)
            case "deferred":
                since = moment
            case _:
                return moment + LOOK_AGAIN_S
        return (moment if since is None else since) + limit_s

    def _fail(self, record: JobRecord, limit_s: float, queued: bytes) -> bool:
        """Fail a job that has waited too long. Returns False if it has gone on, or was cancelled, meanwhile."""
        moment = now()
        ttl_s = self._store.settings.failure_ttl_s if record.failure_ttl_s is None else record.failure_ttl_s
        error = QueueTimeout(f"the job waited longer than its queue_timeout_s of {limit_s:g} s", "queue_timeout_s")
        final = job_object(
            record,
            status="failed",
            ended_at=moment.timestamp(),
            ttl_s=ttl_s if ttl_s > 0 else None,
            error=error.to_dict(),
        )
        keys = [
            job_key(record.id),
            events_key(record.id),
            rq_queue_key(record.origin),
            ScheduledJobRegistry(record.origin, self._client, serializer=SERIALIZER).key,
            FailedJobRegistry(record.origin, self._client, serializer=SERIALIZER).key,
            Result.get_key(record.id),
            DEADLINES,
        ]
        args: list[Any] = [
            record.id,
            dumps(final),
            ttl_s,
            utcformat(moment),
            int(moment.timestamp()) + ttl_s if ttl_s > 0 else "+inf",
            queued,
            b64encode(zlib.compress(error.message.encode())),
        ]
        if not self._expire(keys=keys, args=args):
            return False
        log.info("job %s has waited longer than its queue_timeout_s and is failed", record.id)
        self._store.end_dependents(record.id)
        # Those of RQ's users that are to start all the same.
        job = Job.fetch(record.id, connection=self._client, serializer=SERIALIZER)
        Queue(record.origin, connection=self._client, serializer=SERIALIZER).enqueue_dependents(job)
        return True
