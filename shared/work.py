"""What workers do to jobs in Redis: pull, commit, hand back, and the leases that they hold them under.

Every change of a job's state is one script, so that no crash leaves it half done. The scripts are in
`shared/lua/`; this module builds their arguments and names their answers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import redis
from rq.utils import now, utcformat

from shared.lua import script
from shared.names import (
    DEFAULT_MODEL,
    JOBS_INDEX,
    PRIORITIES,
    SETTLING,
    WORKERS,
    events_key,
    free_key,
    held_key,
    job_key,
    lease_key,
    live_queues_key,
    name_of_rq_queue,
    rq_queue_key,
    split_queue_name,
)
from shared.reading import JobReader
from shared.records import JobRecord, SlotTime
from shared.stream import dumps

CommitOutcome = Literal["ok", "gone", "lost", "ended", "cancelled", "behind"]

#: RQ counts an execution as abandoned when its registration runs out, and then fails or retries the job. Ours
#: must never run out: whether a worker lives is told by its lease.
EXECUTION_TTL_S = 366 * 86_400
#: For so long after it last looked, others rely on it that a worker will use its free slots.
FREE_MS = 1000
#: A job that was at work each of so many times in a row that its process died, without a token gained in between, runs
#: with no other job beside it, and after so many times it fails.
ALONE_AFTER_CRASHES, MOST_CRASHES = 2, 3
#: Logs that do not expire have this time left.
FOR_EVER_S = 10 * 366 * 86_400
#: Beyond the largest age that a job can have.
NEVER_S = 100 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class Opening:
    """What a worker has room for at one priority.

    Attributes:
        level: the priority's place in `PRIORITIES`.
        room: jobs it may take of this priority and more urgent ones together.
        credits: the tokens that each RQ queue is owed. Who is owed most comes first, of equals the earlier one.
    """

    level: int
    room: int
    credits: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A job a worker has taken, and the execution id that proves it.

    Attributes:
        rank: the priority whose order it was taken in, as its place in `PRIORITIES`; age may have moved it forward.
        is_orphaned: the web process whose caller waits for it has no lease.
    """

    record: JobRecord
    execution: str
    raw: dict[bytes, bytes]
    rank: int = 1
    is_orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of one pull.

    Attributes:
        jobs: those that were taken, in order.
        waiting: the queues, of those looked at, in which jobs are left.
        live_queues: how many queues the model and `default` have ever had.
        leaves_some: whether jobs were left for workers that need not displace any.
    """

    jobs: list[Pulled]
    waiting: set[str]
    live_queues: int
    leaves_some: bool


@dataclass(frozen=True, slots=True)
class End:
    """How a job ends: its job object, and the number of tokens in its log.

    `tail` is the data of a last token event, of text that was held back; it counts as a token. The log has to have
    `needed` tokens, else the outcome is `behind`. `data` is `final` as it is written.
    """

    job_id: str
    execution: str
    final: dict[str, Any]
    tokens: int
    ttl_s: int
    tail: str = ""
    needed: int = 0
    data: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", dumps(self.final))


def log_ttl_s(ttl_s: int) -> int:
    """How long the log of an ended job is kept whose record is kept for `ttl_s` (below 0: for ever).

    One that is gone with the record could not tell its last readers the end.
    """
    return FOR_EVER_S if ttl_s < 0 else max(60, ttl_s)


@dataclass(frozen=True, slots=True)
class Doomed:
    """A job that has crashed its process too often. Its execution still owns it, so that its end can be committed."""

    job_id: str
    execution: str
    crashes: int


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What became of the jobs that dead workers held.

    Attributes:
        queued: ids of those that wait again.
        committed: ids of those whose end was committed but not yet recorded; the caller now holds them.
        doomed: those that may not run again; they stay where they are until their end is committed.
        cancelled: ids of those of `queued` that somebody has cancelled.
    """

    queued: list[str] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)
    doomed: list[Doomed] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __add__(self, other: Reclaimed) -> Reclaimed:
        return Reclaimed(
            self.queued + other.queued,
            self.committed + other.committed,
            self.doomed + other.doomed,
            self.cancelled + other.cancelled,
        )


class WorkStore(JobReader):
    """The worker side of a job's life. Safe to share between threads.

    Every method raises redis-py's own errors when Redis cannot be reached.
    """

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client)
        self._pull = script(client, "pull")
        self._commit = script(client, "commit")
        self._hand_back = script(client, "hand_back")
        self._note_slot_time = script(client, "note_slot_time")
        self._reclaim = script(client, "reclaim")

    def pull(self, worker: str, queues: Sequence[str], count: int) -> list[Pulled]:
        """Take up to `count` jobs from RQ queues, most urgent first, into the worker's held list."""
        levels = [PRIORITIES.index(split_queue_name(name)[1]) for name in queues]
        openings = [
            Opening(level, count, {name: 0.0 for name, at in zip(queues, levels, strict=True) if at == level})
            for level in sorted(set(levels))
        ]
        return self.take(worker, "", openings).jobs

    def take(
        self,
        worker: str,
        model: str,
        openings: Sequence[Opening],
        *,
        free: int | None = None,
        quantum: float = 1.0,
        age_s: float = NEVER_S,
        lends: bool = False,
    ) -> Taken:
        """Take jobs into the worker's held list, in one round trip.

        Jobs come by priority, and within one from the queue that is owed most, which a job then lowers by `quantum`.

        With `lends`, at most one job is taken before its time: one that has waited for `age_s` for each priority that
        it is moved forward by, where more urgent jobs wait too. It is the oldest such head of a queue, and it needs
        room at its own priority, so a slot that is free. In the room of the others it counts at its new rank.

        Args:
            worker: who takes them.
            model: whose queues are counted for `Taken.live_queues`.
            openings: most urgent first, each with the queues to look at.
            free: slots in which nothing runs. While another worker of the model has some, no more jobs are taken than
                that; None to take no notice of others, nor they of this one.
            quantum: tokens a job is reckoned to cost until they are counted.
            age_s: see above.
            lends: see above.
        """
        moment = now()
        expires = int(moment.timestamp()) + EXECUTION_TTL_S
        live = live_queues_key(model), live_queues_key(DEFAULT_MODEL)
        keys = [held_key(worker), JOBS_INDEX, *live, free_key(model), WORKERS]
        args: list[Any] = [
            worker,
            uuid.uuid4().hex,
            utcformat(moment),
            moment.timestamp(),
            expires,
            EXECUTION_TTL_S,
            *(utcformat(moment - timedelta(seconds=min(levels * age_s, NEVER_S))) for levels in (1, 2)),
            int(lends),
            quantum,
            -1 if free is None else free,
            FREE_MS,
            ALONE_AFTER_CRASHES,
        ]
        for opening in openings:
            order = sorted(opening.credits, key=opening.credits.__getitem__, reverse=True)
            keys += map(rq_queue_key, order)
            args += (opening.level, opening.room, len(order), *map(opening.credits.__getitem__, order))
        taken, left, live_queues, leaves_some = self._pull(keys=keys, args=args)
        waiting = {name_of_rq_queue(key.decode()) for key in left}
        return Taken([_pulled(*job) for job in taken], waiting, live_queues, bool(leaves_some))

    def commit(self, ends: Sequence[End]) -> list[CommitOutcome]:
        """Commit the ends of jobs, in one round trip; one outcome for each."""
        args: list[Any] = []
        for end in ends:
            status = end.final["status"]
            name = "failed" if status == "failed" else "done"
            args += (end.execution, status, end.tokens, name, end.data, end.ttl_s, end.tail, end.needed)
        keys = [key for end in ends for key in (job_key(end.job_id), events_key(end.job_id))]
        return [outcome.decode() for outcome in self._commit(keys=keys, args=args)]

    def hand_back(
        self, worker: str, jobs: Iterable[tuple[str, str]], slot_times: Mapping[str, SlotTime] | None = None
    ) -> list[str]:
        """Give (job id, execution id) pairs back to the front of their queues, in that order.

        `slot_times` tells by execution id how long they have been in slots, where that is known better than it was
        last noted. Returns the ids of those that went back although somebody has cancelled them: with nobody to take
        them they would wait, so the caller has to end them (`JobStore.cancel_many`).
        """
        known = slot_times or {}
        args = [x for job_id, execution in jobs for x in (job_id, execution, *_in_ms(known.get(execution)))]
        if not args:
            return []
        return [job_id.decode() for job_id in self._hand_back(keys=[held_key(worker)], args=[worker, *args])]

    def note_slot_times(self, times: Mapping[tuple[str, str], SlotTime]) -> None:
        """Note how long jobs, as (job id, execution id), have been in slots, unless they have another owner now."""
        if times:
            keys = [job_key(job_id) for job_id, _ in times]
            args = [x for (_, execution), time in times.items() for x in (execution, *_in_ms(time))]
            self._note_slot_time(keys=keys, args=args)

    # --- leases ---

    def renew_lease(self, worker: str, lease_s: float) -> None:
        """Say that `worker` lives.

        A Redis that is full allows that, as long as the lease has not run out.
        """
        lease_ms = int(lease_s * 1000)
        pipe = self.client.pipeline(transaction=False)
        pipe.pexpire(lease_key(worker), lease_ms)
        pipe.sismember(WORKERS, worker)
        if pipe.execute() != [True, True]:
            pipe.set(lease_key(worker), "1", px=lease_ms)
            pipe.sadd(WORKERS, worker)
            pipe.execute()

    def drop_lease(self, worker: str) -> None:
        """Say that `worker` is gone; whatever it still holds can be reclaimed at once."""
        pipe = self.client.pipeline()
        pipe.delete(lease_key(worker))
        pipe.srem(SETTLING, worker)
        pipe.exists(held_key(worker))
        if not pipe.execute()[-1]:
            self.client.srem(WORKERS, worker)

    def reclaim(self, caller: str) -> Reclaimed:
        """Give back what workers without a lease held.

        Args:
            caller: the worker that takes over what is only to be recorded; empty for somebody who cannot.
        """
        found = Reclaimed()
        for name in sorted(n.decode() for n in self.client.smembers(WORKERS)):
            if name != caller and not self.client.exists(lease_key(name)):
                found += self._take_from(name, caller, seen=False)
        return found

    def bury(self, dead: str, blamed: Iterable[str] = ()) -> Reclaimed:
        """Give back what a worker held that has ended for certain, lease or not.

        Args:
            dead: its name.
            blamed: the executions that its process worked on, if it crashed: each counts a crash against its job.
        """
        return self._take_from(dead, "", seen=True, blamed=blamed)

    def _take_from(self, dead: str, caller: str, *, seen: bool, blamed: Iterable[str] = ()) -> Reclaimed:
        queued, committed, doomed, cancelled = self._reclaim(
            keys=[lease_key(dead), held_key(dead), WORKERS, held_key(caller)],
            args=[dead, caller, int(seen), MOST_CRASHES, *blamed],
        )
        return Reclaimed(
            [i.decode() for i in queued],
            [i.decode() for i in committed],
            [Doomed(i.decode(), execution.decode(), crashes) for i, execution, crashes in doomed],
            [i.decode() for i in cancelled],
        )

    def trim_index(self, start: int, count: int = 1000) -> int:
        """Drop expired and deleted jobs from a stretch of the index.

        Readers of a job that RQ's own tools have deleted are told, and its log goes once they had time to look. Returns
        where the next stretch starts (0 at the end).
        """
        ids = self.client.zrange(JOBS_INDEX, start, start + count - 1)
        pipe = self.client.pipeline(transaction=False)
        for job_id in ids:
            pipe.exists(job_key(job_id.decode()))
        expired = [job_id for job_id, there in zip(ids, pipe.execute(), strict=True) if not there]
        if expired:
            self.client.zrem(JOBS_INDEX, *expired)
            self.stream.let_go([job_id.decode() for job_id in expired])
        return start + len(ids) - len(expired) if len(ids) == count else 0


def _in_ms(time: SlotTime | None) -> tuple[int | str, int | str]:
    """As the scripts take it: empty is what is not known."""
    fields = time.fields if time else {}
    return fields.get("sl_used_ms", ""), fields.get("sl_prompt_ms", "")


def _pulled(job_id: bytes, execution: bytes, rank: int, orphaned: int, flat: list[bytes]) -> Pulled:
    raw = dict(zip(flat[::2], flat[1::2], strict=True))
    return Pulled(JobRecord.parse(job_id.decode(), raw), execution.decode(), raw, rank, bool(orphaned))
