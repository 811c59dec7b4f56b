"""The jobs a worker holds: pulled, and neither recorded as ended nor handed back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.registry import FailedJobRegistry

from shared.errors import InvalidRequest
from shared.jobs import Pulled
from shared.names import SERIALIZER, events_key, held_key, job_key, web_lease_key
from shared.records import JobRecord, job_object
from shared.settings import Settings
from shared.stream import dumps

log = logging.getLogger("slotline.worker")

#: RQ counts an execution as abandoned when its registration runs out, and then fails or retries the job. Ours
#: must never run out: whether a worker lives is told by its lease.
EXECUTION_TTL_S = 366 * 86_400


@dataclass(slots=True, eq=False)
class HeldJob:
    """A job as RQ's objects, and as we read it.

    Attributes:
        stopped: set by RQ's stop-execution command.
        is_orphaned: the web process whose caller waits for it was gone when it was pulled.
    """

    record: JobRecord
    job: Job
    execution: Execution
    stopped: bool = False
    is_orphaned: bool = False

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record.id


def hold(
    pulled: Iterable[Pulled], connection: Any, worker: str, settings: Settings, *, find_orphans: bool = False
) -> list[HeldJob]:
    """Make RQ's objects for jobs just pulled, and register their executions with RQ in one round trip.

    The same round trip finds orphans where asked to. A job that RQ cannot read (somebody wrote its hash by hand) is
    failed on the spot and left out.
    """
    held = []
    with connection.pipeline() as pipe:
        for p in pulled:
            try:
                held.append(_restore(p, connection, worker, settings))
            except Exception as error:
                log.exception("job %s cannot be read and is failed", p.record.id)
                _fail_unreadable(p, f"the job's record cannot be read: {error}", worker, pipe)
        for h in held:
            _register(h, pipe)
        webs = ask_for_leases(held, pipe) if find_orphans else []
        orphaned = orphans(held, webs, pipe.execute())
    for h in orphaned:
        h.is_orphaned = True
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


def _restore(pulled: Pulled, connection: Any, worker: str, settings: Settings) -> HeldJob:
    job = Job(pulled.record.id, connection=connection, serializer=SERIALIZER)
    job.restore(pulled.raw)
    # RQ's own defaults drop results after 500 s and keep failures for a year.
    job.result_ttl = settings.result_ttl_s if job.result_ttl is None else job.result_ttl
    job.failure_ttl = settings.failure_ttl_s if job.failure_ttl is None else job.failure_ttl
    execution = Execution(pulled.execution, job.id, connection, worker_name=worker)
    return HeldJob(pulled.record, job, execution)


def _fail_unreadable(pulled: Pulled, message: str, worker: str, pipe: Any) -> None:
    record = pulled.record
    error = InvalidRequest(message).to_dict()
    final = dumps(job_object(record, status="failed", ended_at=time.time(), error=error))
    pipe.xadd(events_key(record.id), {"event": "failed", "data": final}, id="0-*")
    pipe.hset(job_key(record.id), mapping={"status": "failed", "sl_end": "failed"})
    pipe.zadd(FailedJobRegistry(record.origin, pipe).key, {record.id: "+inf"})
    pipe.lrem(held_key(worker), 0, record.id)


def _register(held: HeldJob, pipe: Any) -> None:
    """What RQ's `Execution.create` does, for an execution whose id the pull already wrote as the fence."""
    job, execution = held.job, held.execution
    execution.save(ttl=EXECUTION_TTL_S, pipeline=pipe)
    ExecutionRegistry(job.id, pipe).add(execution, ttl=EXECUTION_TTL_S, pipeline=pipe)
    job.started_job_registry.add_execution(execution, pipeline=pipe, ttl=EXECUTION_TTL_S)
    pipe.sadd(execution.worker_executions_key, execution.composite_key)


def waited_s(record: JobRecord, now: float | None = None) -> float:
    """Seconds since the job was queued."""
    since = record.enqueued_at or record.created_at
    return max(0.0, (now or time.time()) - since) if since else 0.0
