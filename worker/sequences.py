"""The sequences of a KV cache, each with what is known and what is computed of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

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

    @property
    def remaining(self) -> int:
        """Tokens known but not yet in the KV cache."""
        return len(self.tokens) - self.n_past


class Sequences:
    """All sequences that the KV cache can hold, by what they are good for."""

    def __init__(self, count: int) -> None:
        self._free = [Sequence(seq_id) for seq_id in reversed(range(count))]
        self._held: dict[Sequence, None] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._held)

    @property
    def in_use(self) -> list[Sequence]:
        """Those that slots work on."""
        return [s for s in self._held if s.in_use]

    @property
    def kept(self) -> list[Sequence]:
        """Those that are kept for their prefix, the least recently used first."""
        return sorted((s for s in self._held if not s.in_use), key=attrgetter("used_at"))

    @property
    def has_free(self) -> bool:
        """Whether one holds nothing."""
        return bool(self._free)

    def take(self) -> Sequence:
        """One that holds nothing, for a slot."""
        sequence = self._free.pop()
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

    def give_back(self, sequence: Sequence) -> None:
        """It holds nothing any more."""
        del self._held[sequence]
        sequence.tokens, sequence.n_past, sequence.in_use = [], 0, False
        sequence.donor, sequence.awaits, sequence.shareable = None, 0, False
        self._free.append(sequence)
