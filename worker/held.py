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
from shared.names import PRIORITIES, SERIALIZER, events_key, held_key, job_key, web_lease_key
from shared.records import JobRecord, job_object
from shared.settings import Settings
from shared.stream import dumps
from shared.work import Pulled

log = logging.getLogger("slotline.worker")


@dataclass(slots=True, eq=False)
class HeldJob:
    """A job as RQ's objects, and as we read it.

    Attributes:
        rank: the priority whose order it was taken in, as its place in `PRIORITIES`.
        is_orphaned: the web process whose caller waits for it was gone when it was pulled.
        stopped: set by RQ's stop-execution command.
    """

    record: JobRecord
    job: Job
    execution: Execution
    rank: int = 1
    is_orphaned: bool = False
    stopped: bool = False

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record.id

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
        try:
            job = _restore(p, connection, settings)
        except Exception as error:
            log.exception("job %s cannot be read and is failed", p.record.id)
            _fail_unreadable(p.record, f"the job's record cannot be read: {error}", execution)
        else:
            held.append(HeldJob(p.record, job, execution, p.rank, find_orphans and p.is_orphaned))
    return held


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


def _restore(pulled: Pulled, connection: Any, settings: Settings) -> Job:
    job = Job(pulled.record.id, connection=connection, serializer=SERIALIZER)
    job.restore(pulled.raw)
    # RQ's own defaults drop results after 500 s and keep failures for a year.
    job.result_ttl = settings.result_ttl_s if job.result_ttl is None else job.result_ttl
    job.failure_ttl = settings.failure_ttl_s if job.failure_ttl is None else job.failure_ttl
    return job


def _fail_unreadable(record: JobRecord, message: str, execution: Execution) -> None:
    error = InvalidRequest(message).to_dict()
    final = dumps(job_object(record, status="failed", ended_at=time.time(), error=error))
    job = Job(record.id, connection=execution.connection, serializer=SERIALIZER)
    job.origin = record.origin
    with execution.connection.pipeline() as pipe:
        pipe.xadd(events_key(record.id), {"event": "failed", "data": final}, id="0-*")
        pipe.hset(job_key(record.id), mapping={"status": "failed", "sl_end": "failed"})
        pipe.zadd(FailedJobRegistry(record.origin, pipe).key, {record.id: "+inf"})
        execution.delete(job=job, pipeline=pipe)
        pipe.lrem(held_key(execution.worker_name), 0, record.id)
        pipe.execute()


def waited_s(record: JobRecord, now: float | None = None) -> float:
    """Seconds since the job was queued."""
    since = record.enqueued_at or record.created_at
    return max(0.0, (now or time.time()) - since) if since else 0.0
