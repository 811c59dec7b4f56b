"""The jobs a worker holds: pulled, and neither recorded as ended nor handed back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rq.executions import Execution
from rq.job import Job
from rq.registry import FailedJobRegistry

from shared.errors import InvalidRequest
from shared.names import PRIORITIES, SERIALIZER, held_key, job_key, web_lease_key
from shared.records import JobRecord, job_object
from shared.settings import Settings
from shared.work import ALONE_AFTER_CRASHES, End, Pulled, WorkStore, log_ttl_s

log = logging.getLogger("slotline.worker")


@dataclass(slots=True, eq=False)
class HeldJob:
    """A job as we read it, and as RQ's objects.

    Attributes:
        raw: its hash in Redis.
        result_ttl_s, failure_ttl_s: how long its record is kept after its end, below 0 for ever. RQ's own defaults
            drop results after 500 s and keep failures for a year.
        rank: the priority whose order it was taken in, as its place in `PRIORITIES`.
        is_orphaned: the web process whose caller waits for it was gone when it was pulled.
        stopped: set by RQ's stop-execution command.
    """

    record: JobRecord
    execution: Execution
    raw: dict[bytes, bytes]
    result_ttl_s: int
    failure_ttl_s: int
    rank: int = 1
    is_orphaned: bool = False
    stopped: bool = False
    _job: Job | None = None

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record.id

    @property
    def job(self) -> Job:
        """RQ's object, which few jobs need: making it takes as long as a tenth of all else that is done for a job.

        Raises:
            Exception: RQ cannot read the hash, which somebody has written by hand.
        """
        if self._job is None:
            job = Job(self.id, connection=self.execution.connection, serializer=SERIALIZER)
            job.restore(self.raw)
            job.result_ttl, job.failure_ttl = self.result_ttl_s, self.failure_ttl_s
            self._job = job
        return self._job

    @property
    def is_ours(self) -> bool:
        """Whether it was submitted by us: it has none of what only RQ's users can give a job, such as callbacks."""
        return self.record.fingerprint is not None

    @property
    def runs_alone(self) -> bool:
        """Whether it has crashed its process so often that no other job may be beside it."""
        return self.record.crashes >= ALONE_AFTER_CRASHES

    @property
    def priority(self) -> int:
        """Its place in `PRIORITIES`: 0 is the most urgent."""
        return PRIORITIES.index(self.record.priority)


def hold(
    pulled: Iterable[Pulled], connection: Any, worker: str, settings: Settings, *, find_orphans: bool = False
) -> list[HeldJob]:
    """Make RQ's objects for jobs just pulled.

    A job that RQ cannot read (somebody wrote its hash by hand) is failed on the spot and left out.

    Args:
        pulled: what `WorkStore.take` gave.
        connection: the Redis client.
        worker: the name of the worker.
        settings: how long the records of jobs are kept that do not say so.
        find_orphans: believe that a web process without a lease is gone.
    """
    held = []
    for p in pulled:
        execution = Execution(p.execution, p.record.id, connection, worker_name=worker)
        ttl_s, failure_ttl_s = p.record.result_ttl_s, p.record.failure_ttl_s
        job = HeldJob(
            p.record,
            execution,
            p.raw,
            settings.result_ttl_s if ttl_s is None else ttl_s,
            settings.failure_ttl_s if failure_ttl_s is None else failure_ttl_s,
            p.rank,
            find_orphans and p.is_orphaned,
        )
        if not job.is_ours and (error := _unreadable(job)) is not None:
            log.error("job %s cannot be read and is failed", p.record.id, exc_info=error)
            _fail_unreadable(job, f"the job's record cannot be read: {error}")
        else:
            held.append(job)
    return held


def _unreadable(held: HeldJob) -> Exception | None:
    """Why RQ cannot read a job; None if it can."""
    try:
        _ = held.job
    except Exception as error:
        return error
    return None


def ask_for_leases(jobs: Iterable[HeldJob], pipe: Any) -> list[str]:
    """Put on a pipeline, last, whether the web processes that jobs are bound to live; returns their names."""
    webs = sorted({held.record.bound for held in jobs if held.record.bound is not None})
    for web in webs:
        pipe.exists(web_lease_key(web))
    return webs


def orphans(jobs: Iterable[HeldJob], webs: list[str], replies: list[Any]) -> list[HeldJob]:
    """The jobs whose web process has no lease, by the replies to a pipeline that ended with `ask_for_leases`."""
    gone = {web for web, lives in zip(reversed(webs), reversed(replies), strict=False) if not lives}
    return [held for held in jobs if held.record.bound in gone]


def _fail_unreadable(held: HeldJob, message: str) -> None:
    """End a job without RQ's object for it, unless it has another owner by now."""
    record, execution = held.record, held.execution
    connection: Any = execution.connection
    error = InvalidRequest(message).to_dict()
    final = job_object(record, status="failed", ended_at=time.time(), error=error)
    (outcome,) = WorkStore(connection).commit([End(held.id, execution.id, final, 0, log_ttl_s(held.failure_ttl_s))])
    if outcome not in ("ok", "ended"):
        return
    job = Job(held.id, connection=connection, serializer=SERIALIZER)
    job.origin = record.origin
    with connection.pipeline() as pipe:
        pipe.watch(job_key(held.id))
        if pipe.hget(job_key(held.id), "sl_exec") != execution.id.encode():
            return
        pipe.multi()
        pipe.hset(job_key(held.id), "status", "failed")
        pipe.zadd(FailedJobRegistry(record.origin, pipe).key, {held.id: "+inf"})
        execution.delete(job=job, pipeline=pipe)
        pipe.lrem(held_key(execution.worker_name), 0, held.id)
        pipe.execute()


def waited_s(record: JobRecord, now: float | None = None) -> float:
    """Seconds since the job was queued."""
    since = record.enqueued_at or record.created_at
    return max(0.0, (now or time.time()) - since) if since else 0.0
