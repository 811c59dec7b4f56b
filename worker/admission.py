"""Which requests may have a slot: those that a model can serve at all, and those there is room for now."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import ContextLengthExceeded, SlotlineError, UnsupportedCapability
from worker.backend import ModelInfo
from worker.prefix_cache import Match, PrefixCache
from worker.requests import Request
from worker.slots import Slot, SlotPool


def refusal(request: Request, info: ModelInfo) -> SlotlineError | None:
    """Why a request can never be served by a model as it was loaded; None if it can.

    The intake has looked already; what would wait for ever must not depend on that.
    """
    if request.embed != (info.n_embd is not None):
        only = "makes no embeddings; start one with" if request.embed else "makes embeddings only; start one without"
        return UnsupportedCapability(f"this worker {only} --pooling", "model")
    if request.embed and len(request.prompt) > info.n_batch:
        return ContextLengthExceeded(
            f"the prompt has {len(request.prompt)} tokens; an embedding is made of at most {info.n_batch} (--n-batch)",
            "prompt",
        )
    if request.most_tokens > info.room:
        return ContextLengthExceeded(
            f"the request may come to {request.most_tokens} tokens and there is room for {info.room}",
            "prompt" if request.embed else "max_tokens",
        )
    return None


def has_room(request: Request, match: Match, beside: Sequence[Slot], cache: PrefixCache) -> bool:
    """Whether a request fits beside some slots, with what they have and may come to need.

    What is kept for reuse does not count, since it goes when room is short. Prefixes that are shared count once.
    """
    if cache.cells is None:
        return True
    need = sum(slot.need for slot in beside) + request.reserve - match.expected
    if cache.used + need <= cache.cells:
        return True  # even with all that is kept
    held = cache.held([slot.sequence for slot in beside if slot.sequence is not None], match)
    return held + need <= cache.cells


def to_displace(request: Request, pool: SlotPool, cache: PrefixCache) -> list[Slot] | None:
    """The fewest slots to take from less urgent requests so that a request can start: the least urgent and youngest.

    Empty if it can start as it is, None if it cannot start at all for now.
    """
    active = pool.active
    least = 0 if len(active) < len(pool) else 1
    victims = sorted((s for s in active if s.priority > request.priority), key=lambda s: (-s.priority, -s.admitted))
    if least > len(victims):
        return None
    match = cache.find(request)
    # All of them first: what waits for room asks in every tick, and mostly this is the answer.
    if victims and not has_room(request, match, [s for s in active if s not in victims], cache):
        return None
    for count in range(least, len(victims) + 1):
        taken = victims[:count]
        if has_room(request, match, [s for s in active if s not in taken], cache):
            return taken
    return None
