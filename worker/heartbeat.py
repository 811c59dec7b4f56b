"""What a worker does every second: renew its lease, look after the jobs it holds, follow the queues, take over from
dead workers.

Main thread only, save that any thread may note missed replies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rq.worker.base import WorkerStatus

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

if TYPE_CHECKING:
    from worker.slot_worker import SlotWorker

log = logging.getLogger("slotline.worker")

HEARTBEAT_S = 1.0
#: How often a stretch of the index of jobs is looked through for expired ones.
TRIM_S = 10.0


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
        # A short lease has to be renewed before it runs out.
        self._every_s = min(HEARTBEAT_S, worker.settings.lease_s / 3)
        self._healthy_since: float | None = None
        self._next = 0.0
        self._last_beat = time.time()
        self._next_trim = 0.0
        self._trim_from = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next beat."""
        return time.monotonic() >= self._next

    @property
    def is_healthy(self) -> bool:
        """Whether Redis answered the last time it was asked."""
        return self._healthy_since is not None

    @property
    def trusts_leases(self) -> bool:
        """Whether a lease that is not there means that its holder is dead.

        Only once everybody alive has had time to renew theirs: leases run out for nothing while Redis is away.
        """
        since = self._healthy_since
        return since is not None and time.monotonic() - since >= self._worker.settings.lease_s

    def note_outage(self) -> None:
        """Whatever was asked may have happened without our knowing; and leases have run out for nothing."""
        self.missed_replies, self._healthy_since = True, None

    def beat(self) -> None:
        """Go through all duties.

        Raises:
            RedisError: Redis did not answer; `note_outage` is the caller's to say.
        """
        worker = self._worker
        self._next = time.monotonic() + self._every_s
        if self._has_slept():
            self._healthy_since = None
        worker.store.renew_lease(worker.name, worker.settings.lease_s)
        worker.registry.report(worker.stats())
        self._check_held()
        self.follow_queues()
        self._healthy_since = self._healthy_since or time.monotonic()
        if self.missed_replies:
            self.missed_replies = False
            self._reread_held()
        if self.trusts_leases:
            self._reclaim()
        self._trim_index()

    def _has_slept(self) -> bool:
        """Whether this machine was suspended: leases ran out meanwhile, and others need time to renew theirs.

        By the wall clock, since the monotonic one stands still meanwhile. That the former is set only costs a lease.
        """
        since, self._last_beat = self._last_beat, time.time()
        return self._last_beat - since > self._worker.settings.lease_s

    def _check_held(self) -> None:
        """Notice what RQ's own tools did to our jobs, commands that were lost, and callers that are gone."""
        worker, jobs = self._worker, list(self._worker.held.values())
        with self._connection.pipeline(transaction=False) as pipe:
            worker.set_state(WorkerStatus.BUSY if jobs else WorkerStatus.IDLE, pipeline=pipe)
            worker.heartbeat(pipeline=pipe)
            before = len(pipe)
            for held in jobs:
                pipe.hmget(job_key(held.id), "status", "sl_cancel", "sl_exec")
            webs = ask_for_leases(jobs, pipe) if self.trusts_leases else []
            replies = pipe.execute()
        for held, (status, cancel, execution) in zip(jobs, replies[before:], strict=False):
            self._check(held, status, cancel, execution)
        for held in orphans(jobs, webs, replies):
            log.info("job %s is cancelled: the web process that it was for is gone", held.id)
            worker.engine.cancel(held.execution.id)

    def _check(self, held: HeldJob, status: bytes | None, cancel: bytes | None, execution: bytes | None) -> None:
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
                worker.store.hand_back(worker.name, [(job_id, execution.decode())])

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

    def _reclaim(self) -> None:
        """Take over from dead workers."""
        queued, committed = self._worker.store.reclaim(self._worker.name)
        if queued:
            log.warning("took back %d jobs of a dead worker: %s", len(queued), ", ".join(queued))
        for job_id in committed:
            self._record_again(job_id)

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

    def _trim_index(self) -> None:
        """Forget expired jobs, a stretch of the index at a time."""
        if time.monotonic() >= self._next_trim:
            self._next_trim = time.monotonic() + TRIM_S
            self._trim_from = self._worker.store.trim_index(self._trim_from)


def _by_priority(names: Iterable[str]) -> list[list[str]]:
    """Queues of each of `PRIORITIES`, a model's own before those of `default`."""
    own_first = sorted(names, key=lambda name: split_queue_name(name)[0] == DEFAULT_MODEL)
    return [[n for n in own_first if split_queue_name(n)[1] == priority] for priority in PRIORITIES]


def _is_of(model: str, name: str) -> bool:
    """Whether a queue that somebody made with RQ is for a model: named by our rule, or just as the model is.

    A queue that is just called `default` is RQ's own, for any kind of job.
    """
    return split_queue_name(name)[0] == model and name != DEFAULT_MODEL
