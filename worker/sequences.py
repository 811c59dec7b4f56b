"""The sequences of a KV cache, each with what is known and what is computed of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from worker.backend import State
from worker.kv_cells import Run


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence.

    A slot's sequence knows the whole prompt and answer so far, of which the first `n_past` tokens are in the KV cache.
    One that is kept for its prefix knows only what it holds.

    Attributes:
        in_use: whether a slot works on it.
        born: counts the requests that began; donors are always older than who waits for them.
        used_at: counts uses; the smallest is the least recent.
        shareable: whether later requests may begin from it.
        donor: the sequence whose progress it waits for, instead of computing the same itself.
        awaits: how far `donor` has to come.
        runs: its cells (`KvCells`).
        state: what it holds, where that was taken out of the KV cache; `seq_id` says nothing then.
    """

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    n_past: int = 0
    in_use: bool = False
    born: int = 0
    used_at: int = 0
    shareable: bool = False
    donor: Sequence | None = None
    awaits: int = 0
    runs: list[Run] = field(default_factory=list)
    state: State | None = None

    @property
    def remaining(self) -> int:
        """Tokens known but not yet in the KV cache."""
        return len(self.tokens) - self.n_past


class Sequences:
    """All sequences that the KV cache can hold, by what they are good for."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._held: dict[Sequence, None] = {}
        self._parked: dict[Sequence, None] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._held)  # not those that are parked

    @property
    def in_use(self) -> list[Sequence]:
        """Those that slots work on."""
        return [s for s in self._held if s.in_use]

    @property
    def kept(self) -> list[Sequence]:
        """Those that are kept for their prefix, the least recently used first."""
        return sorted((s for s in self._held if not s.in_use), key=attrgetter("used_at"))

    @property
    def parked(self) -> list[Sequence]:
        """Those that were taken out of the KV cache, the least recently used first."""
        return sorted(self._parked, key=attrgetter("used_at"))

    @property
    def has_free(self) -> bool:
        """Whether one holds nothing."""
        return bool(self._free)

    def take(self) -> Sequence:
        """One that holds nothing, for a slot: the first such, so that those in use are neighbours."""
        sequence = Sequence(heappop(self._free))
        self._held[sequence] = None
        self.begin(sequence)
        return sequence

    def begin(self, sequence: Sequence) -> None:
        """A slot works on it from now on."""
        sequence.in_use = True
        sequence.born = self.touch(sequence)

    def touch(self, sequence: Sequence) -> int:
        """Note that it was used just now; returns the count of uses so far."""
        self._clock += 1
        sequence.used_at = self._clock
        return self._clock

    def at(self, seq_id: int) -> Sequence | None:
        """The one that holds something there."""
        return next((s for s in self._held if s.seq_id == seq_id), None)

    def swap(self, sequence: Sequence, seq_id: int) -> None:
        """Let it change places with whatever is there."""
        other = self.at(seq_id)
        if other is not None:
            other.seq_id = sequence.seq_id
        else:
            self._free.remove(seq_id)
            self._free.append(sequence.seq_id)
            heapify(self._free)
        sequence.seq_id = seq_id

    def park(self, sequence: Sequence, state: State) -> None:
        """What it holds was taken out of the KV cache: its place is free, and it holds it still."""
        del self._held[sequence]
        heappush(self._free, sequence.seq_id)
        sequence.state = state
        self._parked[sequence] = None

    def forget(self, sequence: Sequence) -> None:
        """Forget one that is parked."""
        del self._parked[sequence]
        sequence.state, sequence.tokens, sequence.n_past, sequence.shareable = None, [], 0, False

    def give_back(self, sequence: Sequence) -> None:
        """It holds nothing any more."""
        del self._held[sequence]
        sequence.tokens, sequence.n_past, sequence.in_use = [], 0, False
        sequence.donor, sequence.awaits, sequence.shareable = None, 0, False
        heappush(self._free, sequence.seq_id)
