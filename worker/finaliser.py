"""Brings RQ's record of a job in line with its committed end.

Jobs that completed, which nearly all do, are recorded together by one script, which writes what RQ's own handler of
success writes; RQ's handlers take as long for a job as all the rest of the worker. Every other end goes through RQ's
own methods. Callbacks and webhooks of RQ users run afterwards on a small pool, with a time limit that is no signal.
"""

from __future__ import annotations

import logging
import queue
import threading
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from redis.exceptions import RedisError
from rq.callbacks import execute_failure_callback, execute_stopped_callback, execute_success_callback
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.rate_limit import release_slot
from rq.registry import CanceledJobRegistry
from rq.timeouts import TimerDeathPenalty
from rq.utils import now, utcformat

from shared.errors import from_dict
from shared.jobs import JobStore
from shared.lua import script
from shared.names import SERIALIZER, doorbell_key, held_key, job_key, split_queue_name
from shared.records import NO_TIME, SlotTime
from worker.held import HeldJob

log = logging.getLogger("slotline.finaliser")

Kind = Literal["completed", "failed", "cancelled", "stopped", "gone", "retry", "handed_back"]

RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a held job. `final` is the committed job object, `data` the same as JSON.

    `slot_time` is that of a job that has not ended.
    """

    kind: Kind
    held: HeldJob
    final: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    message: str = ""
    slot_time: SlotTime = NO_TIME


class Finaliser:
    """Takes outcomes from any thread and records them in order."""

    def __init__(
        self,
        worker: Any,
        store: JobStore,
        on_done: Callable[[str], None],
        abandon: threading.Event | None = None,
    ) -> None:
        self._worker = worker
        self._store = store
        self._connection: Any = store.client
        self._record_all = script(store.client, "record")
        self._on_done = on_done
        self._abandon = abandon or threading.Event()
        self._queue: queue.SimpleQueue[list[Outcome] | None] = queue.SimpleQueue()
        self._callbacks = ThreadPoolExecutor(max_workers=4, thread_name_prefix="callback")
        self._thread = threading.Thread(target=self._run, name="finaliser")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Record what is there, let callbacks end, and end the threads."""
        self._queue.put(None)
        self._thread.join()
        self._callbacks.shutdown(wait=True)

    def put(self, *outcomes: Outcome) -> None:
        """Queue outcomes that belong together."""
        self._queue.put(list(outcomes))

    def _run(self) -> None:
        going = True
        while going:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            going = None not in batch
            self._record([o for outcomes in batch if outcomes is not None for o in outcomes])

    def _record(self, outcomes: list[Outcome]) -> None:
        """Many at once where that is possible, the others one by one, in order."""
        completed: list[Outcome] = []
        handed_back: list[Outcome] = []
        others: list[Outcome] = []
        for outcome in outcomes:
            if outcome.kind == "completed" and _is_plain(outcome.held):
                completed.append(outcome)
            else:
                (handed_back if outcome.kind == "handed_back" else others).append(outcome)
        if completed:
            self._insist(completed, self._record_completed)
        if handed_back:
            self._insist(handed_back, self._hand_back)
        for outcome in others:
            self._insist([outcome], self._record_one)

    def _insist(self, outcomes: list[Outcome], record: Callable[[list[Outcome]], None]) -> None:
        """Record outcomes, however long Redis is away, and run their callbacks."""
        recorded = self._until_recorded(outcomes, record)
        for outcome in outcomes:
            self._on_done(outcome.held.execution.id)
            if recorded:
                self._call_back(outcome)

    def _until_recorded(self, outcomes: list[Outcome], record: Callable[[list[Outcome]], None]) -> bool:
        while not self._abandon.is_set():
            try:
                record(outcomes)
                return True
            except RedisError as error:
                log.warning("Redis did not take the end of %d jobs, trying again: %s", len(outcomes), error)
                self._abandon.wait(RETRY_S)
            except Exception:
                # The end is committed, so API and readers have it; only RQ's record lags behind.
                log.exception("RQ's record of %s could not be written", [o.held.id for o in outcomes])
                return True
        return False

    # --- completed, many at once ---

    def _record_completed(self, outcomes: list[Outcome]) -> None:
        """All of them in one round trip, but for those with dependents, which RQ moves job by job."""
        moment = now()
        args: list[Any] = [self._worker.name, utcformat(moment), moment.timestamp()]
        for outcome in outcomes:
            held, execution = outcome.held, outcome.held.execution
            if not held.is_ours:  # callbacks look at these
                held.job.ended_at, held.job._result = moment, outcome.final
            result = b64encode(outcome.data.encode())
            began_s = execution.created_at.timestamp()
            args += (held.id, execution.id, held.record.origin, began_s, result, held.result_ttl_s)
        replies = self._record_all(keys=[held_key(self._worker.name), self._worker.key], args=args)
        for outcome, reply in zip(outcomes, replies, strict=True):
            if reply == b"dependents":
                self._record_one([outcome])

    def _record_with_dependents(self, outcome: Outcome) -> None:
        job, execution = outcome.held.job, outcome.held.execution
        job.ended_at, job._result = now(), outcome.final
        queue = self._queue_of(job)
        self._worker.handle_job_success(job, queue, queue.started_job_registry, execution)
        self._let_go(outcome.held, self._connection)

    # --- everything else, one by one ---

    def _record_one(self, outcomes: list[Outcome]) -> None:
        """Record one outcome; where the job changes between our look at it and our write, Redis refuses the write.

        Raises:
            WatchError: that happened; call again.
        """
        (outcome,) = outcomes
        with self._connection.pipeline() as pipe:
            pipe.watch(job_key(outcome.held.id))
            kind = outcome.kind if self._is_due(outcome, pipe) else "gone"
            match kind:
                case "completed":
                    self._record_with_dependents(outcome)
                case "failed" | "stopped":
                    self._store.end_dependents(outcome.held.id)
                    self._record_failed(outcome, pipe)
                case "cancelled":
                    self._store.end_dependents(outcome.held.id)
                    self._record_cancelled(outcome, pipe)
                case "retry":
                    self._record_retry(outcome, pipe)
                case _:
                    pipe.multi()
                    self._let_go(outcome.held, pipe)
                    pipe.execute()
                    if outcome.kind == "gone":
                        self._store.stream.let_go([outcome.held.id])

    def _is_due(self, outcome: Outcome, watching: Any) -> bool:
        """Whether a job is still as its commit left it.

        Not due is what was recorded already (and only the reply was lost), taken over, erased, or ended by RQ's own
        tools since; RQ's handlers, which look at nothing, would overwrite or revive it.
        """
        status, owner = watching.hmget(job_key(outcome.held.id), "status", "sl_exec")
        open_ = {b"started", b"canceled", b"stopped"} if outcome.kind in ("cancelled", "stopped") else {b"started"}
        return bool(owner == outcome.held.execution.id.encode() and status in open_)

    def _record_failed(self, outcome: Outcome, pipe: Any) -> None:
        job, execution = outcome.held.job, outcome.held.execution
        job.ended_at = now()
        message = (outcome.final.get("error") or {}).get("message") or "the job was stopped on request"
        pipe.multi()
        job.set_status(JobStatus.STOPPED if outcome.kind == "stopped" else JobStatus.FAILED, pipeline=pipe)
        pipe.hset(job.key, "ended_at", utcformat(job.ended_at))
        job._handle_failure(
            message,
            pipeline=pipe,
            worker_name=self._worker.name,
            execution_id=execution.id,
            execution_started_at=execution.created_at,
            execution_ended_at=job.ended_at,
        )
        self._worker.increment_failed_job_count(pipe)
        self._worker.increment_total_working_time(job.ended_at - (job.started_at or job.ended_at), pipe)
        self._let_go(outcome.held, pipe)
        pipe.execute()
        self._queue_of(job).enqueue_dependents(job)
        release_slot(job)

    def _record_cancelled(self, outcome: Outcome, pipe: Any) -> None:
        job = outcome.held.job
        job.ended_at = now()
        pipe.multi()
        job.set_status(JobStatus.CANCELED, pipeline=pipe)
        pipe.hset(job.key, "ended_at", utcformat(job.ended_at))
        CanceledJobRegistry(job.origin, self._connection, serializer=SERIALIZER).add(job, pipeline=pipe)
        job.cleanup(job.result_ttl, pipeline=pipe, remove_from_queue=False)
        self._let_go(outcome.held, pipe)
        pipe.execute()
        release_slot(job)

    def _record_retry(self, outcome: Outcome, pipe: Any) -> None:
        """What RQ's `Job.retry` does, but for its one write outside the transaction."""
        job, retries_left = outcome.held.job, outcome.held.job.retries_left
        job.ended_at = now()
        log.warning("job %s failed and is tried again: %s", job.id, outcome.message)
        queue, interval = self._queue_of(job), job.get_retry_interval()
        try:
            pipe.multi()
            self._worker.increment_failed_job_count(pipe)
            job.retries_left = (retries_left or 1) - 1
            if interval:
                queue.schedule_job(job, now() + timedelta(seconds=interval), pipeline=pipe)
            else:
                queue._enqueue_job(job, pipeline=pipe, at_front=job.enqueue_at_front_on_retry)
            pipe.hdel(job.key, "sl_exec")
            # It goes on from its tokens, so its time goes on as well.
            pipe.hset(job.key, mapping=outcome.slot_time.fields)
            self._let_go(outcome.held, pipe)
            pipe.lpush(doorbell_key(*split_queue_name(job.origin)), "1")
            pipe.hexists(job.key, "sl_cancel")
            is_cancelled = pipe.execute()[-1]
        except RedisError:
            job.retries_left = retries_left
            raise
        if is_cancelled:
            self._store.cancel_many([job.id])

    def _hand_back(self, outcomes: list[Outcome]) -> None:
        """Together, so that they keep their order at the front of the queue."""
        jobs = [(o.held.id, o.held.execution.id) for o in outcomes]
        times = {o.held.execution.id: o.slot_time for o in outcomes}
        cancelled = self._store.hand_back(self._worker.name, jobs, times)
        with self._connection.pipeline() as pipe:
            for outcome in outcomes:
                outcome.held.execution.delete(job=outcome.held.job, pipeline=pipe)
            pipe.execute()
        self._store.cancel_many(cancelled)

    def _let_go(self, held: HeldJob, pipe: Any) -> None:
        """Take the job off the held list and its execution off RQ's registries.

        The oldest entry alone: if the same job was pulled again meanwhile, a later one stands for that.
        """
        held.execution.delete(job=held.job, pipeline=pipe)
        pipe.lrem(held_key(self._worker.name), 1, held.id)

    def _queue_of(self, job: Job) -> Queue:
        return Queue(job.origin, connection=self._connection, serializer=SERIALIZER)

    # --- callbacks and webhooks of RQ users ---

    def _call_back(self, outcome: Outcome) -> None:
        if outcome.held.is_ours:
            return
        job = outcome.held.job
        wanted = {
            "completed": job._success_callback_name,
            "failed": job._failure_callback_name,
            "stopped": job._stopped_callback_name,
        }.get(outcome.kind)
        if wanted or (job.webhooks and outcome.kind in ("completed", "failed")):
            self._callbacks.submit(self._run_callback, outcome)

    def _run_callback(self, outcome: Outcome) -> None:
        """A callback that fails is logged; the job has ended all the same."""
        job, penalty = outcome.held.job, TimerDeathPenalty
        try:
            if outcome.kind == "completed":
                execute_success_callback(job, penalty, outcome.final)
                job.send_webhooks(JobStatus.FINISHED)
            elif outcome.kind == "failed":
                error = from_dict(outcome.final["error"])
                execute_failure_callback(job, penalty, type(error), error, None)
                job.send_webhooks(JobStatus.FAILED, exc_string=error.message)
            else:
                execute_stopped_callback(job, penalty)
        except Exception:
            log.exception("a callback of job %s failed", job.id)


def _is_plain(held: HeldJob) -> bool:
    """Whether recording that the job completed is no more than the script does."""
    if held.result_ttl_s == 0:
        return False
    return held.is_ours or not (held.job.repeats_left or held.job.has_rate_limit)
