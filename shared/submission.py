"""A job on its way into Redis: the hash RQ knows, the place where it waits, and the call of the script that does it."""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from dataclasses import dataclass
from typing import Any

import redis
from rq.job import Dependency, Job, Retry
from rq.registry import DeferredJobRegistry, ScheduledJobRegistry
from rq.utils import now

from shared.errors import IdConflict, InvalidRequest, QueueFull
from shared.names import (
    DEADLINES,
    JOB_FUNCTION,
    JOBS_INDEX,
    RQ_QUEUES,
    SERIALIZER,
    doorbell_key,
    idempotency_key,
    live_queues_key,
    model_key,
    queue_name,
    rq_queue_key,
)
from shared.schemas import JobRequest
from shared.settings import Settings


@dataclass(frozen=True, slots=True)
class Submitted:
    """Answer to a submit: the job, and whether it is new."""

    job_id: str
    created: bool

    @classmethod
    def of(cls, reply: tuple[bytes, bytes]) -> Submitted:
        """Read the answer of the `submit` script.

        Raises:
            IdConflict: the id or the key belongs to a job with another body.
            QueueFull: the model already has `max_queue` waiting jobs.
            InvalidRequest: a dependency does not exist or can no longer succeed.
        """
        outcome, detail = (part.decode() for part in reply)
        if outcome == "conflict":
            raise IdConflict(f"the id or key belongs to job {detail!r}, which has another body", "id")
        if outcome == "full":
            raise QueueFull(f"the queue is full: {detail} jobs are waiting")
        if outcome == "no_dependency":
            raise InvalidRequest(f"there is no job {detail!r} to depend on", "depends_on")
        if outcome == "dead_dependency":
            raise InvalidRequest(f"job {detail!r} can no longer complete, so this one would never start", "depends_on")
        return cls(detail, outcome == "created")


@dataclass(frozen=True, slots=True)
class SubmitCall:
    """The keys and arguments of one `submit` script call.

    `drawn` is the job's id if it was made up here, so that nobody else can have sent it.
    """

    keys: list[str]
    args: list[Any]
    drawn: str | None

    @classmethod
    def of(
        cls,
        job: Job,
        request: JobRequest,
        model: str,
        idempotency: str | None,
        idempotency_ttl_s: int,
        ours: dict[str, str | None],
    ) -> SubmitCall:
        """The call for a job that RQ does not have yet; `ours` are fields of its hash beside RQ's, None for none."""
        stored = job.to_dict() | {name: value for name, value in ours.items() if value}
        place, run_at = _place(request)
        dependencies = request.dependencies
        digest = hashlib.sha256((idempotency or "").encode()).hexdigest()
        origin = job.origin
        keys = [
            job.key,
            rq_queue_key(origin),
            JOBS_INDEX,
            live_queues_key(model),
            doorbell_key(model, request.priority),
            model_key(model),
            idempotency_key(digest),
            ScheduledJobRegistry(origin, job.connection).key,
            DeferredJobRegistry(origin, job.connection).key,
            RQ_QUEUES,
            DEADLINES,
        ]
        args = [
            job.id,
            request.fingerprint(),
            int(time.time() * 1000),
            place,
            run_at,
            origin,
            idempotency_ttl_s if idempotency else 0,
            "" if request.queue_timeout_s is None else max(time.time(), run_at) + request.queue_timeout_s,
            len(dependencies),
            *dependencies,
            *(x for pair in stored.items() for x in pair),
        ]
        return cls(keys, args, None if request.id else job.id)

    def answer(self, reply: tuple[bytes, bytes]) -> Submitted:
        """Read the answer of the script; raises as `Submitted.of`.

        A job with an id of ours that is there already is new all the same: it was the first reply that was lost.
        """
        found = Submitted.of(reply)
        return Submitted(found.job_id, found.created or found.job_id == self.drawn)


def new_job(client: redis.Redis, settings: Settings, request: JobRequest, model: str) -> Job:
    """The job as RQ stores it; its id is the request's if that has one. Nothing is sent yet."""
    timeout_s = request.timeout_s or settings.timeout_s
    job = Job.create(
        JOB_FUNCTION,
        args=[request.payload()],
        connection=client,
        id=request.id or uuid.uuid4().hex,
        origin=queue_name(model, request.priority),
        serializer=SERIALIZER,
        timeout=max(1, int(timeout_s)),
        result_ttl=request.result_ttl_s or settings.result_ttl_s,
        failure_ttl=request.result_ttl_s or settings.failure_ttl_s,
        # RQ's default would be the call with its arguments, so the prompt, and workers log it.
        description="generate",
        depends_on=list[Dependency | Job | str](request.dependencies) or None,
        meta=request.metadata,
        retry=Retry(max=request.retries) if request.retries else None,
    )
    job.enqueued_at = now()
    return job


def _place(request: JobRequest) -> tuple[str, int]:
    if request.dependencies:
        return "defer", 0
    if request.run_at is not None:
        return "schedule", _whole_second(request.run_at.timestamp())
    if request.delay_s is not None:
        return "schedule", _whole_second(time.time() + request.delay_s)
    return "queue", 0


def _whole_second(moment: float) -> int:
    """RQ's scheduler counts in whole seconds from 1970 and must not be early."""
    return max(1, math.ceil(moment))
