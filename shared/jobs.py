"""The life of a job in Redis: submit, cancel, erase, retry, and with `shared/work.py` what workers do to it.

Every change of a job's state is one script, so that no crash leaves it half done. The scripts are in
`shared/lua/`; this module builds their arguments and names their answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
)
from rq.utils import now, utcformat

from shared.errors import (
    DependencyFailed,
    InvalidRequest,
    JobAlreadyEnded,
    JobNotEnded,
    JobNotFound,
    SlotlineError,
)
from shared.lua import script
from shared.names import (
    JOB_FUNCTION,
    JOBS_INDEX,
    SERIALIZER,
    doorbell_key,
    events_key,
    job_key,
    rq_queue_key,
)
from shared.reading import answer_so_far
from shared.records import JobRecord, job_object
from shared.schemas import JobRequest
from shared.settings import Settings
from shared.stream import dumps
from shared.submission import SubmitCall, Submitted, new_job
from shared.work import WorkStore


class JobStore(WorkStore):
    """All operations on jobs. Safe to share between threads.

    Every method raises redis-py's own errors when Redis cannot be reached.
    """

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        super().__init__(client)
        self.settings = settings
        self._submit = script(client, "submit")
        self._cancel = script(client, "cancel")
        self._retry = script(client, "retry")

    def submit(
        self,
        request: JobRequest,
        model: str,
        idempotency: str | None = None,
        idempotency_ttl_s: int = 86_400,
        *,
        parent: str | None = None,
        bound: str | None = None,
        notify: str | None = None,
    ) -> Submitted:
        """Store a job and queue, schedule or defer it.

        Args:
            request: what to do; its `id` is used if it has one.
            model: the resolved name of the model.
            idempotency: the caller's `Idempotency-Key`.
            parent: the call of several jobs that it belongs to.
            bound: the web process whose lease it needs to live on.
            notify: the list (`names.feed_key`) its id is pushed to when it ends.

        Raises:
            IdConflict: the id or the key belongs to a job with another body.
            QueueFull: the model already has `max_queue` waiting jobs.
            InvalidRequest: a dependency does not exist or can no longer succeed.
        """
        call = self._submit_call(request, model, parent, bound, notify, idempotency, idempotency_ttl_s)
        return Submitted.of(self._submit(keys=call.keys, args=call.args))

    def submit_many(
        self, requests: Sequence[JobRequest], model: str, *, parent: str | None = None, bound: str | None = None
    ) -> list[Submitted]:
        """Store jobs in one round trip, each by itself: where one is refused, others may be queued all the same.

        Raises:
            IdConflict, QueueFull, InvalidRequest: as `submit`, of the first one that is refused.
        """
        if len(requests) == 1:  # the pipeline would first ask whether the script is there
            return [self.submit(requests[0], model, parent=parent, bound=bound)]
        pipe = self.client.pipeline(transaction=False)
        for request in requests:
            call = self._submit_call(request, model, parent, bound)
            self._submit(keys=call.keys, args=call.args, client=pipe)
        return [Submitted.of(reply) for reply in pipe.execute()]

    def _submit_call(
        self,
        request: JobRequest,
        model: str,
        parent: str | None,
        bound: str | None,
        notify: str | None = None,
        idempotency: str | None = None,
        idempotency_ttl_s: int = 0,
    ) -> SubmitCall:
        job = new_job(self.client, self.settings, request, model)
        ours = {"sl_parent": parent, "sl_bound": bound, "sl_notify": notify}
        return SubmitCall.of(job, request, model, idempotency, idempotency_ttl_s, ours)

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancel a job and return its object, which says `cancelled`; a second time changes nothing.

        Jobs of ours that wait for it end with it, since they could never start.

        Raises:
            JobNotFound: there is none.
            JobAlreadyEnded: it has completed or failed.
        """
        outcome = self._end_waiting(self.fetch(job_id))
        if outcome == "missing":
            raise JobNotFound(job_id)
        if outcome == "ended":
            raise JobAlreadyEnded(f"job {job_id!r} has already ended: it is {self.fetch(job_id).status}", "id")
        if outcome == "cancelled":
            self.end_dependents(job_id)
        return self.view(job_id)

    def cancel_many(self, job_ids: Sequence[str]) -> None:
        """Cancel those of some jobs that are there and have not ended, in a few round trips; see `cancel`."""
        going = [record for record in self.fetch_many(job_ids) if record is not None and not record.is_over]
        pipe = self.client.pipeline(transaction=False)
        for record in going:
            self._cancel(*self._cancel_call(record), client=pipe)
        outcomes = pipe.execute()
        self._end_dependents([r.id for r, outcome in zip(going, outcomes, strict=True) if outcome == b"cancelled"])

    def _end_waiting(self, record: JobRecord, error: SlotlineError | None = None) -> str:
        """End a job that waits as cancelled, flag one that runs; the answer of the script."""
        return str(self._cancel(*self._cancel_call(record, error)).decode())

    def _cancel_call(self, record: JobRecord, error: SlotlineError | None = None) -> tuple[list[str], list[Any]]:
        """Keys and arguments of one `cancel` script call."""
        moment = now()
        ttl_s = record.result_ttl_s or self.settings.result_ttl_s
        # What no worker has taken yet has no text.
        tokens = self.stream.tokens(record.id) if record.attempts else []
        final = job_object(
            record,
            status="cancelled",
            ended_at=moment.timestamp(),
            ttl_s=ttl_s if ttl_s > 0 else None,
            **(answer_so_far(tokens) if tokens else {}),
            finish_reason="cancelled",
            error=error.to_dict() if error else None,
        )
        registries = (ScheduledJobRegistry, DeferredJobRegistry, ReadyJobRegistry, CanceledJobRegistry)
        keys = [
            job_key(record.id),
            events_key(record.id),
            rq_queue_key(record.origin),
            *(registry(record.origin, self.client).key for registry in registries),
        ]
        return keys, [record.id, dumps(final), ttl_s, utcformat(moment), int(moment.timestamp())]

    def end_dependents(self, job_id: str) -> None:
        """End the jobs of ours that wait for one that can no longer complete; RQ would let them wait for ever."""
        self._end_dependents([job_id])

    def _end_dependents(self, job_ids: Sequence[str]) -> None:
        pipe = self.client.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.smembers(f"{job_key(job_id)}:dependents")
        waiting = {raw.decode(): job_id for job_id, found in zip(job_ids, pipe.execute(), strict=True) for raw in found}
        for record in self.fetch_many(list(waiting)):
            if record is not None and record.rq_status == "deferred" and record.fingerprint is not None:
                reason = f"job {waiting[record.id]!r}, which this one waited for, did not complete"
                self._end_waiting(record, DependencyFailed(reason, "depends_on"))
                self.end_dependents(record.id)

    def erase(self, job_id: str) -> None:
        """Remove every trace of a job: record, prompt, text and log. A running one is cancelled by its worker.

        Raises:
            JobNotFound: there is none.
        """
        record = self.fetch(job_id)
        if not record.is_over:
            with suppress(JobAlreadyEnded):  # by now
                self.cancel(job_id)
            self.end_dependents(job_id)
        idempotency = self.client.hget(job_key(job_id), "sl_idempotency")
        try:
            Job.fetch(job_id, connection=self.client, serializer=SERIALIZER).delete()
        except NoSuchJobError:
            raise JobNotFound(job_id) from None
        pipe = self.client.pipeline()
        pipe.delete(events_key(job_id))
        if idempotency and self.client.get(idempotency) == job_id.encode():
            pipe.delete(idempotency)
        pipe.zrem(JOBS_INDEX, job_id)
        pipe.execute()
        self.stream.say_removed(job_id)

    def retry(self, job_id: str) -> dict[str, Any]:
        """Queue a failed or cancelled job again, to run from the start.

        Raises:
            JobNotFound: there is none.
            JobAlreadyEnded: it has completed.
            JobNotEnded: it has not ended, or its worker has yet to let go of it.
        """
        record = self.fetch(job_id)
        if record.status == "completed":
            raise JobAlreadyEnded(f"only a failed or cancelled job can be retried; {job_id!r} is completed", "id")
        if not record.is_over:
            raise JobNotEnded(f"only a failed or cancelled job can be retried; {job_id!r} is {record.status}", "id")
        if record.rq_status == "started":
            raise JobNotEnded(f"job {job_id!r} is still being let go by its worker; try again", "id")
        registries = (FailedJobRegistry, CanceledJobRegistry)
        outcome = self._retry(
            keys=[
                job_key(job_id),
                events_key(job_id),
                rq_queue_key(record.origin),
                doorbell_key(record.model, record.priority),
                *(registry(record.origin, self.client).key for registry in registries),
            ],
            args=[job_id, utcformat(now())],
        ).decode()
        if outcome == "missing":
            raise JobNotFound(job_id)
        if outcome != "ok":
            raise JobNotEnded(f"job {job_id!r} was changed at the same time: it is {outcome} now", "id")
        return self.view(job_id)


def request_of(record: JobRecord) -> dict[str, Any]:
    """The generation request in a job's call.

    Raises:
        InvalidRequest: the job calls something else, or has no readable payload.
    """
    try:
        function, args, kwargs = record.arguments()
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the payload is not JSON as RQ's JSONSerializer writes it: {error}") from None
    if function != JOB_FUNCTION:
        raise InvalidRequest(f"this queue runs {JOB_FUNCTION!r} jobs, not {function!r}")
    given = args[0] if args else kwargs.get("request", kwargs)
    if len(args) > 1 or not isinstance(given, dict):
        raise InvalidRequest(f"{JOB_FUNCTION!r} takes one argument, the generation request as a dictionary")
    return given
