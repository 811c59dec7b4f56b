"""The life of a job in Redis: submit, cancel, erase, retry, and with `shared/work.py` what workers do to it.

Every change of a job's state is one script, so that no crash leaves it half done. The scripts are in
`shared/lua/`; this module builds their arguments and names their answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
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

from shared.connection import again_if_lost, wait_for_replicas
from shared.errors import (
    DependencyFailed,
    InvalidRequest,
    JobAlreadyEnded,
    JobNotEnded,
    JobNotFound,
    RedisUnavailable,
    SlotlineError,
)
from shared.lua import script
from shared.names import (
    DEADLINES,
    JOB_FUNCTION,
    JOBS_INDEX,
    SERIALIZER,
    doorbell_key,
    events_key,
    job_key,
    rq_queue_key,
    webhook_key,
)
from shared.records import JobRecord, job_object
from shared.schemas import JobRequest
from shared.settings import Settings
from shared.stream import dumps
from shared.submission import SubmitCall, Submitted, new_job
from shared.webhooks.state import IDS_FIELD, URL_FIELD
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
            RedisUnavailable: it is stored, but fewer than `redis_wait_replicas` replicas have it. Sent again with the
                same id or key, it is found there.
        """
        call = self._submit_call(request, model, parent, bound, notify, idempotency, idempotency_ttl_s)
        return self._store_all([call])[0]

    def submit_many(
        self, requests: Sequence[JobRequest], model: str, *, parent: str | None = None, bound: str | None = None
    ) -> list[Submitted]:
        """Store jobs in one round trip, each by itself: where one is refused, others may be queued all the same.

        Raises:
            IdConflict, QueueFull, InvalidRequest, RedisUnavailable: as `submit`, of the first one that is refused.
        """
        return self._store_all([self._submit_call(request, model, parent, bound) for request in requests])

    def _store_all(self, calls: Sequence[SubmitCall]) -> list[Submitted]:
        """Store jobs, once more where the reply was lost: what is there by then is found by its id."""
        replies, replicas = again_if_lost(partial(self._send, calls))
        submitted = [call.answer(reply) for call, reply in zip(calls, replies, strict=True)]
        wanted = self.settings.redis_wait_replicas
        if replicas < wanted:
            ids = ", ".join(s.job_id for s in submitted[:3]) + (", …" if len(submitted) > 3 else "")
            raise RedisUnavailable(
                f"only {replicas} of {wanted} replicas of Redis have it in time; it is stored and may run: "
                f"ask for {ids}, or send it again with the same id or Idempotency-Key"
            )
        return submitted

    def _send(self, calls: Sequence[SubmitCall]) -> tuple[list[Any], int]:
        """The answers of the script, and how many replicas are known to have what was written."""
        wanted = self.settings.redis_wait_replicas
        if len(calls) == 1 and not wanted:  # the pipeline would first ask whether the script is there
            return [self._submit(keys=calls[0].keys, args=calls[0].args)], 0
        pipe = self.client.pipeline(transaction=False)
        for call in calls:
            self._submit(keys=call.keys, args=call.args, client=pipe)
        if not wanted:
            return pipe.execute(), 0
        wait_for_replicas(pipe, self.settings)
        *replies, _, replicas = pipe.execute()
        return replies, replicas

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
        ours = {"sl_parent": parent, "sl_bound": bound, "sl_notify": notify, URL_FIELD: request.webhook_url}
        return SubmitCall.of(job, request, model, idempotency, idempotency_ttl_s, ours)

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancel a job and return its object, which says `cancelled`; a second time changes nothing.

        Jobs of ours that wait for it end with it, since they could never start.

        Raises:
            JobNotFound: there is none.
            JobAlreadyEnded: it has completed or failed.
        """
        outcome = self.end_waiting(self.fetch(job_id))
        if outcome == "missing":
            raise JobNotFound(job_id)
        if outcome == "ended":
            raise JobAlreadyEnded(f"job {job_id!r} has already ended: it is {self.fetch(job_id).status}", "id")
        if outcome == "cancelled":
            self.end_dependents(job_id)
        return self.view(job_id)

    def cancel_many(self, job_ids: Sequence[str]) -> None:
        """Cancel those of some jobs that are there and have not ended, in a few round trips; see `cancel`."""
        while going := [r for r in self.fetch_many(job_ids) if r is not None and not r.is_over]:
            pipe = self.client.pipeline(transaction=False)
            for record in going:
                self._cancel(*self._cancel_call(record), client=pipe)
            outcomes = dict(zip((record.id for record in going), pipe.execute(), strict=True))
            self._end_dependents([job_id for job_id, outcome in outcomes.items() if outcome == b"cancelled"])
            job_ids = [job_id for job_id, outcome in outcomes.items() if outcome == b"stale"]

    def end_waiting(self, record: JobRecord, error: SlotlineError | None = None) -> str:
        """End a job that waits as cancelled, flag one that runs.

        Returns what came of it: `missing`, `ended`, `cancelled` or `running`.
        """
        while (outcome := self._cancel(*self._cancel_call(record, error)).decode()) == "stale":
            # A worker took it, added to its text and gave it back since it was read.
            try:
                record = self.fetch(record.id)
            except JobNotFound:
                return "missing"
        return str(outcome)

    def _cancel_call(self, record: JobRecord, error: SlotlineError | None = None) -> tuple[list[str], list[Any]]:
        """Keys and arguments of one `cancel` script call."""
        moment = now()
        ttl_s = record.result_ttl_s or self.settings.result_ttl_s
        said = self.said(record)
        final = job_object(
            record,
            status="cancelled",
            ended_at=moment.timestamp(),
            ttl_s=ttl_s if ttl_s > 0 else None,
            **said.answer,
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
        return keys, [record.id, dumps(final), ttl_s, utcformat(moment), int(moment.timestamp()), said.tokens]

    def end_dependents(self, job_id: str) -> None:
        """End the jobs of ours that wait for one that can no longer complete; RQ would let them wait for ever."""
        self._end_dependents([job_id])

    def _end_dependents(self, job_ids: Sequence[str]) -> None:
        pipe = self.client.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.smembers(f"{job_key(job_id)}:dependents")
        waiting = {raw.decode(): job_id for job_id, found in zip(job_ids, pipe.execute(), strict=True) for raw in found}
        for record in self.fetch_many(list(waiting)):
            if record is not None:
                self.end_dependent(record, waiting[record.id])

    def end_dependent(self, record: JobRecord, dependency_id: str) -> None:
        """End a job of ours that waits for one that can no longer complete, and those that wait for it."""
        if record.rq_status == "deferred" and record.fingerprint is not None:
            reason = f"job {dependency_id!r}, which this one waited for, did not complete"
            self.end_waiting(record, DependencyFailed(reason, "depends_on"))
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
        idempotency, webhooks = self.client.hmget(job_key(job_id), "sl_idempotency", IDS_FIELD)
        try:
            Job.fetch(job_id, connection=self.client, serializer=SERIALIZER).delete()
        except NoSuchJobError:
            raise JobNotFound(job_id) from None
        pipe = self.client.pipeline()
        pipe.delete(events_key(job_id))
        if idempotency and self.client.get(idempotency) == job_id.encode():
            pipe.delete(idempotency)
        for webhook_id in (webhooks or b"").decode().split():
            pipe.delete(webhook_key(webhook_id))  # whoever claims it next takes it out of the outbox
        pipe.zrem(JOBS_INDEX, job_id)
        pipe.zrem(DEADLINES, job_id)
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
        moment, limit_s = now(), queue_timeout_of(record)
        outcome = self._retry(
            keys=[
                job_key(job_id),
                events_key(job_id),
                rq_queue_key(record.origin),
                doorbell_key(record.model, record.priority),
                *(registry(record.origin, self.client).key for registry in registries),
                DEADLINES,
            ],
            args=[job_id, utcformat(moment), "" if limit_s is None else moment.timestamp() + limit_s],
        ).decode()
        if outcome == "missing":
            raise JobNotFound(job_id)
        if outcome != "ok":
            raise JobNotEnded(f"job {job_id!r} was changed at the same time: it is {outcome} now", "id")
        return self.view(job_id)


def queue_timeout_of(record: JobRecord) -> float | None:
    """How many seconds a job may wait; None for as long as it takes, or where its payload cannot be read."""
    try:
        limit_s = request_of(record).get("queue_timeout_s")
    except InvalidRequest:
        return None
    # What RQ's users have queued is checked when a worker takes it.
    return float(limit_s) if isinstance(limit_s, int | float) else None


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
