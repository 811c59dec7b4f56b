"""Which requests may have a slot: those that a model can serve at all, and those there is room for now."""

from __future__ import annotations

from shared.errors import ContextLengthExceeded, SlotlineError, UnsupportedCapability
from worker.backend import ModelInfo
from worker.prefix_cache import PrefixCache
from worker.requests import Request
from worker.slots import SlotPool


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
    if request.most_tokens > info.n_ctx_seq:
        return ContextLengthExceeded(
            f"the request may come to {request.most_tokens} tokens and there is room for {info.n_ctx_seq}",
            "prompt" if request.embed else "max_tokens",
        )
    return None


def has_room(request: Request, pool: SlotPool, cache: PrefixCache, kv_cells: int) -> bool:
    """Whether a request fits beside what the active ones may come to need; evicts what is kept, if that helps."""
    free = kv_cells - pool.reserved
    if request.reserve > free:
        return False
    # What is kept for reuse only ever takes cells that nobody has reserved.
    slot, reusable = cache.longest(request)
    excess = cache.tokens - reusable + request.reserve - free
    if excess > 0:
        cache.evict(excess, spare=slot)
    return True
