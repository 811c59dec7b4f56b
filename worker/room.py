"""How many more jobs a worker may take, by their urgency.

A job may have the slot of any that is less urgent, since the engine pauses that one for it. So what counts against the
room for a priority is the held jobs of that priority and of more urgent ones, whether they run or were displaced. Where
there are as many of these as slots the rest is left for other workers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shared.names import PRIORITIES
from worker.held import HeldJob

#: A job that was taken before its time keeps others from its slot for so long, then for as long it does not, by turns.
TURN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Entry:
    held: HeldJob
    since: float


class Workload:
    """The jobs that a worker has pulled and that its engine has not ended or given up. Any thread may use it."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, held: HeldJob) -> None:
        """Count a job."""
        self._entries[held.execution.id] = _Entry(held, self._clock())

    def remove(self, execution: str) -> None:
        """Count the job of an execution no longer; nothing happens if it is not here."""
        self._entries.pop(execution, None)

    @property
    def free(self) -> int:
        """Slots without a job; none beside one that runs alone."""
        return 0 if self._is_shut else max(0, self.slots - len(self))

    @property
    def lends(self) -> bool:
        """Whether a job may be taken before its time: one at a time, so that age never shuts out the urgent."""
        return not any(_is_early(entry.held) for entry in self._all())

    def room(self) -> list[int]:
        """Jobs that may be taken of each of `PRIORITIES` and more urgent ones together.

        A job that was taken before its time counts by the rank that age gave it, so that nobody displaces it, but
        only for `TURN_S` of every two: age gives order, not immunity. Beside a job that runs alone there is no room.
        """
        if self._is_shut:
            return [0] * len(PRIORITIES)
        now = self._clock()
        by_level = Counter(_level(entry, now) for entry in self._all())
        counted, room = 0, []
        for level in range(len(PRIORITIES)):
            counted += by_level[level]
            room.append(max(0, self.slots - counted))
        return room

    def by_queue(self) -> Counter[str]:
        """How many of the jobs came from each RQ queue."""
        return Counter(entry.held.record.origin for entry in self._all())

    @property
    def _is_shut(self) -> bool:
        return any(entry.held.runs_alone for entry in self._all())

    def _all(self) -> list[_Entry]:
        return list(self._entries.values())


def _is_early(held: HeldJob) -> bool:
    return held.rank < held.priority


def _level(entry: _Entry, now: float) -> int:
    has_turn = int((now - entry.since) / TURN_S) % 2 == 0
    return entry.held.rank if has_turn else entry.held.priority
