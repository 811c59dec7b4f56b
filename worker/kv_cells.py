"""Who holds which cells of a KV cache in which sequences share what they have in common.

A mirror of what llama.cpp keeps but does not tell. Cells are counted in runs: cells of consecutive positions, of which
each holder has the first few. The longest holder of a run may grow it; anybody else begins a run of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class Run:
    """Cells of consecutive positions, and how many of them, from the first, each holder has."""

    holders: dict[Holder, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Cells in use: what the longest holder has."""
        return max(self.holders.values(), default=0)


class Holder(Protocol):
    """A sequence of the KV cache."""

    @property
    def runs(self) -> list[Run]:
        """What it holds, in order of position."""
        ...


class KvCells:
    """Counts the cells in use.

    Attributes:
        used: cells that any sequence holds.
    """

    def __init__(self) -> None:
        self.used = 0

    def grow(self, holder: Holder, count: int) -> None:
        """`holder` has computed `count` more tokens."""
        run = holder.runs[-1] if holder.runs else None
        if run is None or (len(run.holders) > 1 and run.holders[holder] < run.size):
            run = Run({holder: 0})
            holder.runs.append(run)
        run.holders[holder] += count
        self.used += count

    def share(self, source: Holder, target: Holder, length: int) -> None:
        """`target`, which has nothing, holds the first `length` cells of `source` too."""
        assert not target.runs, "only an empty sequence can begin with another's cells"
        for run, count in _stretches(source, length):
            run.holders[target] = count
            target.runs.append(run)

    def cut(self, holder: Holder, length: int) -> None:
        """`holder` keeps only its first `length` cells."""
        kept = 0
        runs = list(holder.runs)
        for run in runs:
            has, before = run.holders[holder], run.size
            keep = min(has, length - kept)
            kept += keep
            if keep:
                run.holders[holder] = keep
            else:
                del run.holders[holder]
                holder.runs.remove(run)
            self.used -= before - run.size

    def own_tail(self, holder: Holder) -> int:
        """Cells at its end that nobody else holds."""
        own = 0
        for run in reversed(holder.runs):
            has = run.holders[holder]
            others = max((count for other, count in run.holders.items() if other is not holder), default=0)
            own += max(0, has - others)
            if others:
                break
        return own

    @staticmethod
    def held(parts: Iterable[tuple[Holder, int]]) -> int:
        """Cells in all of the parts together, each the first so many cells of a sequence; shared ones count once."""
        reach: dict[Run, int] = {}
        for holder, length in parts:
            for run, count in _stretches(holder, length):
                reach[run] = max(count, reach.get(run, 0))
        return sum(reach.values())

    def check_integrity(self, holders: Sequence[Holder]) -> None:
        """Raise AssertionError where the count of cells is not that of the sequences."""
        runs = {run for holder in holders for run in holder.runs}
        assert self.used == sum(run.size for run in runs), "cells in use are miscounted"
        for run in runs:
            assert all(run in other.runs for other in run.holders), "a run that its holder does not know"


def _stretches(holder: Holder, length: int) -> Iterable[tuple[Run, int]]:
    for run in holder.runs:
        if length <= 0:
            return
        count = min(run.holders[holder], length)
        length -= count
        yield run, count
