"""The intake thread: turns the jobs a worker has pulled into requests of the engine.

Rendering, tokenising and compiling a grammar take time that neither the main thread, which renews the lease, nor
the engine can spare.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from shared.errors import InternalError, QueueTimeout, SlotlineError
from shared.jobs import JobStore, request_of
from shared.stream import Event as LogEvent
from worker.backend import SamplingParams
from worker.black_box import INTAKE
from worker.engine import Engine
from worker.held import HeldJob, waited_s
from worker.intake import Intake
from worker.logprobs import from_json
from worker.requests import Ended, Event, Request, Stats

log = logging.getLogger("slotline.worker")

RETRY_S = 0.25


class Preparer:
    """Prepares held jobs in order; what cannot be served ends here, without a slot."""

    def __init__(
        self,
        intake: Intake,
        store: JobStore,
        engine: Engine,
        emit: Callable[[list[Event]], None],
        abandon: threading.Event,
    ) -> None:
        self._intake = intake
        self._store = store
        self._engine = engine
        self._emit = emit
        self._abandon = abandon
        self._queue: queue.SimpleQueue[Sequence[HeldJob] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="intake")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Prepare what is there and end the thread; a second call does nothing."""
        self._queue.put(None)
        self._thread.join()

    def put(self, jobs: Sequence[HeldJob]) -> None:
        """Queue jobs that were pulled together."""
        self._queue.put(jobs)

    def _run(self) -> None:
        while (jobs := self._queue.get()) is not None:
            for held in jobs:
                try:
                    with self._engine.box.working_on(INTAKE, held.execution.id):
                        request = self._prepare(held)
                    if held.record.cancelling or held.is_orphaned:
                        self._engine.decline(request)
                    else:
                        self._engine.submit(request)
                except SlotlineError as error:
                    self._refuse(held, error)
                except Exception as error:
                    log.exception("a defect while job %s was prepared", held.id)
                    self._refuse(held, InternalError(f"{type(error).__name__}: {error}"))

    def _prepare(self, held: HeldJob) -> Request:
        record = held.record
        waited = waited_s(record)
        prepared = self._intake.prepare(request_of(record), seed_source=f"{record.id}:{record.created_at}")
        limit = prepared.body.queue_timeout_s
        earlier = self._log(record.id) if record.attempts > 1 else []
        tokens = [e.json() for e in earlier if e.name == "token"]
        if [t["index"] for t in tokens] != list(range(len(tokens))):
            # Going on from what is left would answer another prompt, and going back would say other tokens again.
            raise InternalError("the job cannot go on, since a part of its log is gone; retry it")
        logged = [t for t in tokens if t["token"] is not None]
        # One that had a slot has not come too late, though it may have been displaced before its first token.
        may_wait = None if limit is None or earlier else limit - waited
        if may_wait is not None and may_wait < 0:
            raise QueueTimeout(f"the job waited longer than its queue_timeout_s of {limit:g} s", "queue_timeout_s")
        return self._intake.request(
            prepared,
            record.id,
            held.execution.id,
            generated=[t["token"] for t in logged],
            logged_logprobs=[from_json(t["logprobs"]) for t in logged if "logprobs" in t],
            has_started=bool(earlier),
            slot_time=record.slot_time,
            waited_s=waited,
            start_by=None if may_wait is None else time.monotonic() + may_wait,
            priority=held.priority,
            rank=held.rank,
            queue=record.origin,
        )

    def _log(self, job_id: str) -> list[LogEvent]:
        """What earlier attempts have logged; an outage of Redis is waited for."""
        while not self._abandon.is_set():
            try:
                return list(self._store.stream.replay(job_id))
            except RedisError as error:
                log.warning("the log of job %s cannot be read, trying again: %s", job_id, error)
                self._abandon.wait(RETRY_S)
        raise InternalError("Redis did not answer before the worker had to stop")

    def _refuse(self, held: HeldJob, error: SlotlineError) -> None:
        request = Request(held.id, held.execution.id, (), SamplingParams(), 1, waited_s=waited_s(held.record))
        stats = Stats(0, 0, 0, request.waited_s, 0.0, 0.0, 0.0, None)
        self._emit([Ended(request, 0, "", stats, None, error)])
