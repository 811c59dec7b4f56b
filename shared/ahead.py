"""How many jobs are ahead of one that waits, and how long it may take, from counters alone.

Each job gets a ticket when it is queued, the next number of its queue (`sl_ticket`). The tickets of the first and the
last job that wait, with the length of the queue, tell the place of any other, so nobody looks through a queue. It is
exact as long as nothing leaves the queue out of turn. Jobs that RQ's own tools queued have no ticket, and so no place
among others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from shared.lua import script
from shared.names import DEFAULT_MODEL, PRIORITIES, job_key
from shared.registry import Known

#: Readers of a job hear of its place no more often than this.
EVERY_S = 5.0
#: Jobs that one script call is about, so that others get their turn at Redis.
CHUNK = 200


@dataclass(frozen=True, slots=True)
class Pace:
    """How the live workers of a model get on: their free slots, and the seconds that all of them take for one job."""

    idle_slots: int = 0
    job_s: float | None = None

    @classmethod
    def of(cls, known: Known, model: str) -> Pace:
        """That of a model; the time is None where no worker is there, or none has ended a job yet."""
        workers = [
            w for w in known.workers if not w.draining and (w.model == model or model == DEFAULT_MODEL) and w.n_parallel
        ]
        rate = sum(worker.n_parallel / worker.job_s for worker in workers if worker.job_s)
        return cls(sum(worker.idle_slots for worker in workers), 1 / rate if rate else None)


class Ahead:
    """Looks at the places of waiting jobs, and tells their readers. Safe to share between threads."""

    def __init__(self, client: redis.Redis) -> None:
        self._look = script(client, "ahead")

    def of(self, job_id: str) -> int | None:
        """How many jobs are to be taken before a queued one; None if it does not wait in a queue, or nobody knows."""
        (ahead,) = self._call([job_key(job_id)], 0, ["0", ""])
        return ahead

    def tell(self, models: Mapping[str, str], known: Known) -> None:
        """Publish a `queued` event for each of the jobs that still wait, unless somebody has just done so.

        Args:
            models: the jobs' ids, each with its model.
            known: the workers there are.
        """
        silent_ms = int((EVERY_S - 0.1) * 1000)  # a little less than the time between two rounds
        paces = {model: Pace.of(known, model) for model in set(models.values())}
        ids = list(models)
        for at in range(0, len(ids), CHUNK):
            chunk = ids[at : at + CHUNK]
            given = [paces[models[job_id]] for job_id in chunk]
            pairs = [x for pace in given for x in (pace.idle_slots, "" if pace.job_s is None else pace.job_s)]
            self._call([job_key(job_id) for job_id in chunk], silent_ms, pairs)

    def _call(self, keys: Sequence[str], silent_ms: int, pairs: Sequence[Any]) -> list[int | None]:
        found: list[int | None] = self._look(keys=keys, args=[" ".join(PRIORITIES), silent_ms, *pairs])
        return found
