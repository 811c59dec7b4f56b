"""The RQ worker that holds many jobs at once.

A thin adapter: it pulls jobs into the engine and beats its heart in between (`worker/heartbeat.py`). The main thread
runs `run`; signals and RQ's pub/sub commands only set flags or post to the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from redis.exceptions import RedisError
from rq.command import parse_payload
from rq.worker import BaseWorker

from shared.deadlines import Deadlines
from shared.jobs import JobStore
from shared.names import DEFAULT_MODEL, PRIORITIES, SERIALIZER, queue_name
from shared.registry import Registry, WorkerStats
from shared.rollback import Holdings
from shared.settings import WorkerSettings
from shared.strays import Strays
from shared.work import Opening
from worker import command_channel
from worker.command_channel import CommandChannel
from worker.doorbell import Doorbell
from worker.engine import Engine
from worker.finaliser import Finaliser, Outcome
from worker.heartbeat import Heartbeat
from worker.held import HeldJob, hold
from worker.intake import Intake
from worker.preparing import Preparer
from worker.publisher import Publisher
from worker.recovery import ROUND_S
from worker.requests import Ended, Event, HandedBack
from worker.room import Workload
from worker.seclusion import Seclusion
from worker.shares import QUANTUM_TOKENS, Shares
from worker.telemetry import Metrics

log = logging.getLogger("slotline.worker")

#: A worker with room looks this often for jobs that came without ringing a doorbell (scheduler, RQ's own enqueue).
LOOK_S = 0.25
#: One that left jobs to workers with free slots looks so soon whether they have taken them.
LOOK_AGAIN_S = 0.02
#: How long jobs that were to be handed back are waited for, with Redis and without.
HAND_BACK_S = 60.0
HAND_BACK_WITHOUT_REDIS_S = 5.0


class SlotWorker(BaseWorker):
    """An RQ worker with as many executions at once as the engine has slots."""

    # The prompt is nobody's business in a log.
    log_job_description = False
    log_result_lifespan = False
    connection: Any
    engine: Engine
    #: Set when the engine gave up after repeated defects.
    engine_failed = False

    def __init__(
        self, name: str, settings: WorkerSettings, client: Any, intake: Intake, n_ctx: int, parent_pid: int
    ) -> None:
        self.model = settings.model_name
        self.settings = settings
        names = [queue_name(m, p) for p in PRIORITIES for m in (self.model, DEFAULT_MODEL)]
        super().__init__(
            names,
            name=name,
            connection=client,
            serializer=SERIALIZER,
            default_result_ttl=settings.result_ttl_s,
            log_job_description=False,
        )
        self.store = JobStore(client, settings)
        self.deadlines = Deadlines(self.store)
        self.strays = Strays(self.store)
        self.registry = Registry(client)
        self.holdings = Holdings(client, name)
        self.held: dict[str, HeldJob] = {}
        self.intake = intake
        self.metrics = Metrics(name)
        self._abandon = threading.Event()
        self.finaliser = Finaliser(self, self.store, self._on_done, self._abandon)
        self.publisher = Publisher(
            self.store,
            self.held,
            self.finaliser,
            self.lose,
            settings.flush_s,
            self._abandon,
            self._give_up,
            self.owns,
        )
        self._n_ctx = n_ctx
        self._wake = threading.Event()
        self._bell = Doorbell(client, name, self.model, self._wake.set, settings.redis_timeout_s)
        self._heard: set[int] = set()
        self._next_look = 0.0
        self._parent_pid = parent_pid
        self._stop_signals = 0
        self._born = time.time()
        self.heart = Heartbeat(self)

    # --- life cycle ---

    def connect(self, engine: Engine) -> None:
        """Work for this engine."""
        self.engine = engine
        self._workload = Workload(len(engine.pool))
        self._seclusion = Seclusion(self._begin, partial(engine.hand_back, running=True), self.settings.drain_s)
        self._shares = [Shares(engine.served) for _ in PRIORITIES]

    def run(self, engine: Engine) -> None:
        """Work until told to stop; return with every job ended or handed back."""
        self.connect(engine)
        self.metrics.connect(engine)
        self._preparer = Preparer(self.intake, self.store, engine, self.emit, self._abandon)
        engine_thread = threading.Thread(target=self._run_engine, name="engine")
        self.register_birth()
        self.subscribe()
        self._install_signal_handlers()
        for thread in (self.finaliser, self.publisher, self._preparer, engine_thread):
            thread.start()
        try:
            self._loop()
            self._drain()
        finally:
            # In the order of the data: nothing new, then the engine, then what it said, then what became of it.
            self._preparer.stop()
            engine.stop()
            engine_thread.join()
            self.publisher.stop()
            self.finaliser.stop()
            self._hand_back_rest()
            self._leave()

    def _loop(self) -> None:
        self._bell.start()
        try:
            while not self._stop_signals:
                look_s = LOOK_S
                try:
                    self._beat_if_due()
                    look_s = self._work_once()
                except RedisError as error:
                    log.warning("no answer from Redis, trying again: %s", error)
                    self.heart.note_outage()
                self._wait(look_s)
        finally:
            self._bell.stop()

    def _beat_if_due(self) -> None:
        if not self.heart.is_due:
            return
        # First, since without Redis nothing that follows is reached.
        if os.getppid() != self._parent_pid and not self._stop_signals:
            log.warning("the parent process is gone; stopping")
            self._stop_signals = 1
        self.heart.beat()
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()

    def _work_once(self) -> float:
        """Pull what there is room for, and listen for what there still is room for. Returns how long to wait."""
        self._seclusion.look(len(self._workload))
        now, rung, levels = time.monotonic(), self._bell.take(), self._levels()
        # What is listened for was looked for; a slot that becomes free beside others changes nothing.
        if rung is None and levels <= self._heard and now < self._next_look:
            return self._next_look - now
        look_s = self._pull(self._openings()) if levels else LOOK_S
        if rung is not None and not self._bell.is_for(rung, levels):
            self._bell.ring(rung)
        self._heard = self._levels() if look_s == LOOK_S else set()
        self._bell.listen(self._heard)
        self._next_look = now + look_s
        return look_s

    def _levels(self) -> set[int]:
        """The priorities there is room for."""
        return {level for level, room in enumerate(self._workload.room()) if room}

    def _openings(self) -> list[Opening]:
        held = self._workload.by_queue()
        return [
            Opening(level, room, shares.credits(self.heart.queues[level], held))
            for level, (room, shares) in enumerate(zip(self._workload.room(), self._shares, strict=True))
            if room
        ]

    def _pull(self, openings: list[Opening]) -> float:
        """Take jobs and have them prepared. Returns after how long to look again, even if nothing rings."""
        taken = self.store.take(
            self.name,
            self.model,
            openings,
            free=self._workload.free,
            quantum=QUANTUM_TOKENS,
            age_s=self.settings.age_s,
            lends=self._workload.lends,
        )
        find_orphans = self.heart.trusts_leases
        held = hold(taken.jobs, self.connection, self.name, self.settings, find_orphans=find_orphans)
        for h in held:
            self.held[h.execution.id] = h
            self._workload.add(h)
            self.executions[h.execution.id] = h.execution
        by_queue = self._workload.by_queue()
        for opening in openings:
            queues = opening.credits.keys()
            self._shares[opening.level].settle(taken.waiting & queues, by_queue.keys() & queues)
        # From here on their tokens count.
        if held:
            self._seclusion.put(held)
            self._seclusion.look(len(self._workload))
        if taken.live_queues != self.heart.live_queues:
            self.heart.follow_queues()
            return 0.0
        # What is left to others was rung for. Until they have heard it this worker must not listen.
        return LOOK_AGAIN_S if taken.leaves_some else LOOK_S

    def _begin(self, jobs: Sequence[HeldJob]) -> None:
        self._preparer.put(jobs)

    def _wait(self, seconds: float) -> None:
        """Wait for something that has to be looked at; what comes later is looked at after that."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _drain(self) -> None:
        """No new jobs; what waits goes back at once, what runs after `drain_s` or at the second signal."""
        log.info("stopping: %d jobs may go on for %g s", len(self._workload), self.settings.drain_s)
        self._preparer.stop()
        self.engine.hand_back(running=False)
        if (held := self._seclusion.take()) is not None:
            self._workload.remove(held.execution.id)
            self.finaliser.put(Outcome("handed_back", held, slot_time=held.record.slot_time))
        deadline = time.monotonic() + self.settings.drain_s
        handed_back_at: float | None = None
        while self.held and not self.engine_failed:
            now = time.monotonic()
            if handed_back_at is None and (self._stop_signals > 1 or now > deadline):
                log.info("handing back %d jobs", len(self._workload))
                self.engine.hand_back(running=True)
                handed_back_at = now
            if handed_back_at is not None and now > handed_back_at + self._patience_s():
                log.error(
                    "%d jobs could not be handed back; they go on when this worker's lease runs out", len(self.held)
                )
                self._abandon.set()
                return
            try:
                self._beat_if_due()
            except RedisError as error:
                log.warning("no answer from Redis while stopping: %s", error)
                self.heart.note_outage()
            self._wait(0.05)

    def _patience_s(self) -> float:
        """How long a hand-back may take: a tick may be long, but without Redis there is nothing to wait for."""
        return HAND_BACK_S if self.heart.is_healthy else HAND_BACK_WITHOUT_REDIS_S

    def _hand_back_rest(self) -> None:
        """What an engine that gave up can no longer hand back by itself."""
        if self.engine_failed and self.held:
            jobs = [(h.id, h.execution.id) for h in self.held.values()]
            try:
                self.store.cancel_many(self.store.hand_back(self.name, jobs, self.engine.slot_times))
            except RedisError as error:
                log.warning("%d jobs go on when this worker's lease runs out: %s", len(jobs), error)

    def _leave(self) -> None:
        try:
            self.unsubscribe()
            self.register_death()
            self.registry.forget(self.name)
            self.store.drop_lease(self.name)
        except RedisError as error:
            log.warning("could not sign off from Redis: %s", error)

    def _run_engine(self) -> None:
        try:
            self.engine.run()
        except Exception:
            log.critical("the engine gave up; this process ends so that a fresh one can take over", exc_info=True)
            self._give_up()

    def _give_up(self) -> None:
        """Leave at once with what is held handed back, and let the parent start a fresh process."""
        self._stop_signals = 2
        self.engine_failed = True
        self._wake.set()

    # --- from other threads ---

    def emit(self, events: list[Event]) -> None:
        """Take what the engine says: pass it on and note which jobs are done here."""
        self.publisher.put(events)
        over = [e.request.execution for e in events if isinstance(e, Ended | HandedBack)]
        for execution in over:
            self._workload.remove(execution)
        if over:
            self._wake.set()

    def _on_done(self, execution: str) -> None:
        self.held.pop(execution, None)
        self.executions.pop(execution, None)
        if self._stop_signals:
            self._wake.set()

    def owns(self, held: HeldJob) -> bool:
        """Whether a job is ours although Redis says otherwise; one that a new server forgot is registered again.

        From any thread.

        Raises:
            RedisError: Redis did not answer.
        """
        return self.holdings.restore(held.record, held.execution.id, held.raw) != "lost"

    def lose(self, execution: str) -> None:
        """Drop a job that has another owner now; from any thread."""
        held = self.held.get(execution)
        if held is not None:
            log.warning("job %s has another owner now; it is dropped here", held.id)
        self.engine.drop(execution)
        self._seclusion.forget(execution)
        self.publisher.journal.forget(execution)
        self._workload.remove(execution)
        self._on_done(execution)
        self._wake.set()
        # Its entry in the held list goes with the next look at that list.
        self.heart.missed_replies = True

    def stats(self) -> WorkerStats:
        """The figures of now; it brings the metrics up to date too."""
        engine, pool = self.engine, self.engine.pool
        active = pool.active
        self.metrics.show(len(active), self.heart.queue_depth + len(engine.waiting))
        return WorkerStats(
            worker=self.name,
            model=self.model,
            n_parallel=len(pool),
            n_batch=engine.backend.info.n_batch,
            n_ctx=self._n_ctx,
            active_slots=len(active),
            idle_slots=len(pool) - len(active),
            prefilling_slots=sum(slot.is_prefilling for slot in active),
            waiting_requests=len(engine.waiting),
            queue_depth=self.heart.queue_depth,
            job_s=None if engine.job_s is None else round(engine.job_s, 3),
            last_tick_age_s=round(engine.last_tick_age_s, 3),
            ticks_total=engine.ticks,
            tokens_total=engine.tokens,
            prompt_tokens_total=engine.prompt_tokens,
            kv_used_tokens=engine.cache.used,
            cached_tokens=engine.cache.tokens,
            started_at=self._born,
            draining=bool(self._stop_signals),
            metrics=self.metrics.render(),
        )

    # --- RQ's hooks: they set flags or post to the engine, and act on nothing themselves ---

    def _set_connection(self, connection: Any) -> Any:
        """Keep our own time limits; RQ would raise them to minutes for its long BLPOP."""
        return connection

    def _install_signal_handlers(self) -> None:
        signal.signal(signal.SIGINT, self.request_stop)
        signal.signal(signal.SIGTERM, self.request_stop)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: hand back at once."""
        self._stop_signals += 1
        self._wake.set()

    def request_stop_execution(self, execution_id: str) -> None:
        """RQ's stop-execution command, on the pub/sub thread."""
        for held in list(self.held.values()):
            if held.execution.id == execution_id:
                held.stopped = True
                self.engine.cancel(execution_id)

    def handle_payload(self, message: dict[str, Any]) -> None:
        """Commands of RQ and our own cancel, on the pub/sub thread."""
        payload = parse_payload(message)
        handlers: dict[str, Callable[[], None]] = {
            "slotline-cancel": lambda: self._cancel_job(payload["job_id"]),
            "stop-execution": lambda: self.request_stop_execution(payload["execution_id"]),
            "stop-job": lambda: self._stop_job(payload["job_id"]),
            "shutdown": lambda: self.request_stop(signal.SIGTERM, None),
        }
        handler = handlers.get(payload.get("command", ""))
        if handler is None:
            log.warning("command %r is not for this kind of worker", payload.get("command"))
        else:
            handler()

    def _cancel_job(self, job_id: str) -> None:
        for held in list(self.held.values()):
            if held.id == job_id:
                self.engine.cancel(held.execution.id)

    def _stop_job(self, job_id: str) -> None:
        for held in list(self.held.values()):
            if held.id == job_id:
                self.request_stop_execution(held.execution.id)

    def subscribe(self) -> None:
        """As RQ's, on a line that is watched."""
        self.pubsub: Any = CommandChannel(self.connection, self.settings.redis_timeout_s)
        self.pubsub.subscribe(**{self.pubsub_channel_name: self.handle_payload})
        self.pubsub_thread: Any = self.pubsub.run_in_thread(
            sleep_time=command_channel.LOOK_S, daemon=True, exception_handler=self._pubsub_exception_handler
        )

    def unsubscribe(self) -> None:
        """Leave it to the thread to close the line; RQ's own does so too after a second, perhaps at the same moment."""
        if self.pubsub_thread:
            self.pubsub.unsubscribe()  # which wakes the thread
            self.pubsub_thread.stop()
            self.pubsub_thread.join(timeout=self.settings.redis_timeout_s)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, thread: Any) -> None:
        """Stay subscribed whatever Redis does; RQ gives up on all but lost connections."""
        log.warning("the command channel was interrupted, trying again: %s", exc)
        time.sleep(ROUND_S)
