"""What a worker does every second: renew its lease, look after the jobs it holds, follow the queues, take over from
dead workers.

Main thread only, save that any thread may note missed replies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError
from rq.worker.base import WorkerStatus

from shared.connection import is_full
from shared.names import (
    DEFAULT_MODEL,
    PRIORITIES,
    RQ_QUEUES,
    held_key,
    job_key,
    live_queues_key,
    name_of_rq_queue,
    rq_queue_key,
    split_queue_name,
)
from shared.work import Pulled
from worker.finaliser import Outcome
from worker.held import HeldJob, ask_for_leases, hold, orphans
from worker.recovery import Recovery

if TYPE_CHECKING:
    from worker.slot_worker import SlotWorker

log = logging.getLogger("slotline.worker")

#: How often a stretch of the index of jobs, and of RQ's registries, is looked through.
TIDY_S = 10.0
#: The same where something was found that has to be looked at once more.
TIDY_SOON_S = 2.0


class Heartbeat:
    """The duties of a worker that come round.

    Attributes:
        queues: the RQ queues to pull from, of each of `PRIORITIES`.
        live_queues: how many of them are noted as the model's and as `default`'s.
        queue_depth: jobs that wait in them.
        missed_replies: set when the held list may hold what we do not know of; the next beat looks.
    """

    def __init__(self, worker: SlotWorker) -> None:
        self._worker = worker
        self._connection: Any = worker.connection
        self.queues = _by_priority(worker.queue_names())
        self.live_queues = 0
        self.queue_depth = 0
        self.missed_replies = False
        self._recovery = Recovery(worker.store, worker.settings, worker.name)
        self._next = 0.0
        self._next_tidy = 0.0
        self._trim_from = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next beat."""
        return time.monotonic() >= self._next

    @property
    def is_healthy(self) -> bool:
        """Whether Redis answered the last time it was asked."""
        return self._recovery.is_healthy

    @property
    def trusts_leases(self) -> bool:
        """Whether a lease that is not there means that its holder is dead."""
        return self._recovery.trusts_leases

    def note_outage(self) -> None:
        """Whatever was asked may have happened without our knowing; and leases have run out for nothing."""
        self.missed_replies = True
        self._recovery.note_outage()

    def beat(self) -> None:
        """Go through all duties.

        Raises:
            RedisError: Redis did not answer; `note_outage` is the caller's to say.
        """
        worker = self._worker
        self._next = time.monotonic() + self._recovery.round_s
        self._recovery.begin_round()
        worker.store.renew_lease(worker.name, worker.settings.lease_s)
        self._check_server()
        _unless_full(lambda: worker.registry.report(worker.stats()))
        self._check_held()
        self.follow_queues()
        self._recovery.end_round()
        if self.missed_replies:
            self.missed_replies = False
            self._reread_held()
        for job_id in self._recovery.take_back():
            self._record_again(job_id)
        _unless_full(worker.deadlines.expire)
        _unless_full(self._tidy)

    def _check_server(self) -> None:
        """Register again all that is held if another server process answers than before, which may lack some of it."""
        holdings, run_id = self._worker.holdings, self._worker.holdings.current_run_id()
        if run_id == holdings.run_id:
            return
        if holdings.run_id:
            log.warning("another Redis process answers than before; what is held is registered again")
            self.note_outage()
            self._register_again()
        holdings.settle(run_id, self._recovery.trust_s)

    def _register_again(self) -> None:
        worker = self._worker
        for held in list(worker.held.values()):
            if not worker.owns(held):
                worker.lose(held.execution.id)
        for ending in worker.publisher.journal.endings():
            held = ending.held
            if worker.holdings.restore(held.record, held.execution.id, held.raw, even_if_gone=False) == "ok":
                worker.held[held.execution.id] = held
                worker.publisher.put(ending.events)
        worker.publisher.say_again()

    def _check_held(self) -> None:
        """Notice what RQ's own tools did to our jobs, commands that were lost, and callers that are gone."""
        worker, jobs = self._worker, list(self._worker.held.values())
        with self._connection.pipeline(transaction=False) as pipe:
            worker.set_state(WorkerStatus.BUSY if jobs else WorkerStatus.IDLE, pipeline=pipe)
            worker.heartbeat(pipeline=pipe)
            pipe.llen(held_key(worker.name))
            before = len(pipe)
            for held in jobs:
                pipe.hmget(job_key(held.id), "status", "sl_cancel", "sl_exec")
            webs = ask_for_leases(jobs, pipe) if self.trusts_leases else []
            replies = pipe.execute(raise_on_error=False)
        for failed in (reply for reply in replies if isinstance(reply, Exception)):
            if not is_full(failed):
                raise failed
        if replies[before - 1] > len(jobs):
            # A pull of ours was carried out later than we looked for it.
            self.missed_replies = True
        times = worker.engine.slot_times
        noted = {(h.id, e): times[e] for h in jobs if (e := h.execution.id) in times}
        _unless_full(lambda: worker.store.note_slot_times(noted))
        for held, (status, cancel, execution) in zip(jobs, replies[before:], strict=False):
            self._check(held, status, cancel, execution)
        for held in orphans(jobs, webs, replies):
            log.info("job %s is cancelled: the web process that it was for is gone", held.id)
            worker.engine.cancel(held.execution.id)

    def _check(self, held: HeldJob, status: bytes | None, cancel: bytes | None, execution: bytes | None) -> None:
        if (status is None or execution != held.execution.id.encode()) and self._worker.owns(held):
            return
        if status is None or cancel or status in (b"canceled", b"stopped") or held.stopped:
            self._worker.engine.cancel(held.execution.id)
        elif execution != held.execution.id.encode():
            self._worker.lose(held.execution.id)

    def _reread_held(self) -> None:
        """Find jobs that were pulled for us by a command whose reply was lost, and give them back."""
        worker, connection = self._worker, self._connection
        known = {held.id for held in worker.held.values()}
        for job_id in {i.decode() for i in connection.lrange(held_key(worker.name), 0, -1)} - known:
            status, owner, execution, end = connection.hmget(
                job_key(job_id), "status", "worker_name", "sl_exec", "sl_end"
            )
            if status != b"started" or owner != worker.name.encode() or execution is None:
                connection.lrem(held_key(worker.name), 0, job_id)
            elif end is not None:
                self._record_again(job_id)
            else:
                log.warning("job %s was pulled without our knowing; it goes back", job_id)
                worker.store.cancel_many(worker.store.hand_back(worker.name, [(job_id, execution.decode())]))

    def follow_queues(self) -> None:
        """Find out from which queues to pull: those noted as the model's or as `default`'s, and those RQ users made."""
        worker, models = self._worker, (self._worker.model, DEFAULT_MODEL)
        with self._connection.pipeline(transaction=False) as pipe:
            for key in (*map(live_queues_key, models), RQ_QUEUES):
                pipe.smembers(key)
            *noted, made = ({name_of_rq_queue(raw.decode()) for raw in raws} for raws in pipe.execute())
        for model, names in zip(models, noted, strict=True):
            new = {name for name in made - names if _is_of(model, name)}
            if new:
                self._connection.sadd(live_queues_key(model), *new)
                names |= new
        self.live_queues = sum(map(len, noted))
        found = sorted({*worker.queue_names()}.union(*noted))
        self.queues = _by_priority(found)
        with self._connection.pipeline(transaction=False) as pipe:
            for name in found:
                pipe.llen(rq_queue_key(name))
            self.queue_depth = sum(pipe.execute())
        worker.engine.queue_depth = self.queue_depth

    def _record_again(self, job_id: str) -> None:
        """A dead worker committed the end of this job but did not record it with RQ."""
        worker = self._worker
        raw = self._connection.hgetall(job_key(job_id))
        last = worker.store.stream.last(job_id)
        if b"sl_exec" not in raw or last is None or not last.is_terminal:
            return
        pulled = Pulled(worker.store.fetch(job_id), raw[b"sl_exec"].decode(), raw)
        (held,) = hold([pulled], self._connection, worker.name, worker.settings)
        worker.held[held.execution.id] = held
        final = last.json()
        worker.finaliser.put(Outcome(final["status"], held, final, last.data))

    def _tidy(self) -> None:
        """Forget expired jobs, a stretch of the index at a time, and end what RQ's own tools have left open."""
        if time.monotonic() >= self._next_tidy:
            strays = self._worker.strays
            self._next_tidy = time.monotonic() + TIDY_S
            self._trim_from = self._worker.store.trim_index(self._trim_from)
            strays.settle([name for names in self.queues for name in names])
            if strays.is_unsure:
                self._next_tidy = time.monotonic() + TIDY_SOON_S


def _unless_full(write: Callable[[], object]) -> None:
    """Write what a Redis that is full can do without; the jobs at hand are more important."""
    try:
        write()
    except RedisError as error:
        if not is_full(error):
            raise
        log.debug("Redis is full and goes without our figures: %s", error)


def _by_priority(names: Iterable[str]) -> list[list[str]]:
    """Queues of each of `PRIORITIES`, a model's own before those of `default`."""
    own_first = sorted(names, key=lambda name: split_queue_name(name)[0] == DEFAULT_MODEL)
    return [[n for n in own_first if split_queue_name(n)[1] == priority] for priority in PRIORITIES]


def _is_of(model: str, name: str) -> bool:
    """Whether a queue that somebody made with RQ is for a model: named by our rule, or just as the model is.

    A queue that is just called `default` is RQ's own, for any kind of job.
    """
    return split_queue_name(name)[0] == model and name != DEFAULT_MODEL
