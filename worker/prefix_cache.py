"""Keeping the KV cache of finished requests for later ones with the same prefix.

An idle slot may keep its sequence. A new request takes the idle slot that shares the longest prefix with it;
when room is short, the sequence that was used least recently goes first.
"""

from __future__ import annotations

from worker.backend import Backend
from worker.requests import Request
from worker.slots import Slot, SlotPool, SlotState


class PrefixCache:
    """Finds, keeps and evicts the sequences of idle slots. Engine thread only."""

    def __init__(self, pool: SlotPool, backend: Backend) -> None:
        self._pool = pool
        self._backend = backend

    @property
    def tokens(self) -> int:
        """KV cells that idle slots keep."""
        return sum(slot.n_past for slot in self._pool.idle)

    def claim(self, request: Request) -> tuple[Slot, int]:
        """The idle slot to use and how many tokens of the request its sequence holds afterwards.

        Only exactly equal tokens count, and at least one token of the request is left to compute. Cuts or clears
        the sequence of the slot accordingly. There must be an idle slot.
        """
        slot, common = self.longest(request)
        if slot is None:
            slot, common = min(self._pool.idle, key=lambda s: (s.n_past > 0, s.last_used_at)), 0
        return slot, self._keep(slot, common)

    def longest(self, request: Request) -> tuple[Slot | None, int]:
        """The idle slot that shares the longest prefix with a request, and its length; (None, 0) if none does."""
        if not request.cache_prompt:
            return None, 0
        wanted = (*request.prompt, *request.generated)
        best: Slot | None = None
        length = 0
        for slot in self._pool.idle:
            common = min(_common(slot.tokens, wanted), len(wanted) - 1)
            if common > length:
                best, length = slot, common
        return best, length

    def evict(self, cells: int, spare: Slot | None = None) -> int:
        """Clear idle sequences, least recently used first, until `cells` are freed; returns how many were."""
        freed = 0
        for slot in sorted(self._pool.idle, key=lambda s: s.last_used_at):
            if freed >= cells:
                break
            if slot is not spare and slot.n_past:
                freed += slot.n_past
                self.drop(slot)
        return freed

    def drop(self, slot: Slot) -> None:
        """Clear the sequence of an idle slot."""
        assert slot.state is SlotState.IDLE
        self._backend.clear(slot.seq_id)
        slot.tokens, slot.n_past = [], 0

    def check_integrity(self) -> None:
        """Raise AssertionError where a kept sequence contradicts its slot."""
        for slot in self._pool.idle:
            assert slot.n_past == len(slot.tokens), f"slot {slot.seq_id} keeps tokens it does not hold"

    def _keep(self, slot: Slot, count: int) -> int:
        if count and (count == slot.n_past or self._backend.cut(slot.seq_id, count)):
            slot.tokens, slot.n_past = slot.tokens[:count], count
            return count
        if slot.n_past:
            self.drop(slot)
        return 0


def _common(a: list[int], b: tuple[int, ...]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
