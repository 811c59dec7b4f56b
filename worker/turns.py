"""Whose turn it is in a tick: what a strategy gets to see of the slots.

Strategies share tokens out among equals. That the urgent come first, that the prefill of one tick has a limit, and that
nobody computes a prefix that another slot is about to have, is settled here, before they are asked.
"""

from __future__ import annotations

from worker.batching import SlotView
from worker.prefix_cache import PrefixCache
from worker.slots import Slot, SlotPool


def views_of(pool: SlotPool, cache: PrefixCache, chunk_size: int, *, whole: bool = False) -> list[SlotView]:
    """The slots that may compute something in this tick, most urgent first, of equal ones the oldest.

    The prefill of all together comes to at most `chunk_size` tokens: more in one pass makes nothing faster and lets
    everybody wait. While a more urgent request is being prefilled, less urgent ones only decode, since its first token
    waits for all that rides along. With `whole`, for embeddings, every slot is computed in one piece.
    """
    ready, urgency = _ready(pool.active, cache)
    if whole:
        return [SlotView(slot.index, slot.remaining, slot.remaining, slot.priority) for slot in ready]
    most_urgent = min((urgency[slot] for slot in ready if slot.remaining > 1), default=0)
    left = chunk_size
    views = []
    for slot in sorted(ready, key=urgency.__getitem__):
        remaining = slot.remaining
        if remaining == 1:
            views.append(SlotView(slot.index, 1, 1, slot.priority))
        elif left and urgency[slot] == most_urgent:
            chunk = min(remaining, left)
            left -= chunk
            views.append(SlotView(slot.index, remaining, chunk, slot.priority))
    return views


def _ready(active: list[Slot], cache: PrefixCache) -> tuple[list[Slot], dict[Slot, int]]:
    """The slots that do not wait for another's prefill, and how urgent each is: no less than who waits for it."""
    ready = []
    urgency = {slot: slot.priority for slot in active}
    owners = {slot.sequence: slot for slot in active}
    for slot in reversed(active):  # a donor is older than who waits for it, so chains are followed from their end
        sequence = slot.sequence
        if sequence is None or not cache.is_waiting(sequence):
            ready.append(slot)
            if slot.cached_tokens is None and slot.request is not None:
                slot.cached_tokens = min(slot.n_past, len(slot.request.prompt))
        elif (donor := owners.get(sequence.donor)) is not None:
            urgency[donor] = min(urgency[donor], urgency[slot])
    return ready[::-1], urgency
