"""How the tokens of one tick are shared out among the slots.

A strategy has no way back to the engine: views of the slots and a token budget in, a plan out. One that has a method
`observe(plan, views, ms)` is also told how long each pass took. Bring your own by a dotted path to a class without
arguments that has `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from worker.tick_cost import TickCost

#: Prefill goes on by as much in every tick, however slow the machine is.
MIN_PREFILL_TOKENS = 16

#: The part of the target that a tick is planned to take. The rest is for what varies from tick to tick.
AIM = 0.95


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a strategy may know of an active slot.

    `remaining` tokens are known but not yet computed: 1 while decoding, more while prefilling. `chunk` is the
    most of them that may be computed in one tick. `priority` is 0 for the most urgent. Views come most urgent first,
    of equal ones the oldest.
    """

    slot: int
    remaining: int
    chunk: int
    priority: int = 0

    @property
    def is_decoding(self) -> bool:
        """Whether one token remains to be computed."""
        return self.remaining == 1


@dataclass(frozen=True, slots=True)
class PlanItem:
    """Compute the next `tokens` tokens of a slot; the last of them yields a new one if `wants_logits`."""

    slot: int
    tokens: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One tick: at most one item for each slot."""

    items: tuple[PlanItem, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in the whole pass."""
        return sum(item.tokens for item in self.items)


class BatchStrategy(Protocol):
    """Decides what a tick computes."""

    def plan(self, slots: Sequence[SlotView], budget: int) -> BatchPlan:
        """Share `budget` tokens out among the slots.

        Every slot gets at most one item, of 1 to min(remaining, chunk) tokens, and all items together at most
        `budget` tokens. The budget is at least the number of slots.
        """
        ...


class DecodeMaximal:
    """One token for every decoding slot, then prefill chunks as far as the budget goes.

    Source: Sarathi-Serve (Agrawal et al. 2024), stall-free batching.
    """

    def plan(self, slots: Sequence[SlotView], budget: int) -> BatchPlan:
        """Decode first."""
        decode, prefill = _split(slots)
        items = _fill(decode, budget)
        return _plan(items, _fill(prefill, budget - _sum(items)))


class PrefillPriority:
    """Prefill chunks first; decoding slots share what is left."""

    def plan(self, slots: Sequence[SlotView], budget: int) -> BatchPlan:
        """Prefill first."""
        decode, prefill = _split(slots)
        items = _fill(prefill, budget)
        return _plan(items, _fill(decode, budget - _sum(items)))


class Balanced:
    """Half the budget for each kind; what one does not use goes to the other."""

    def plan(self, slots: Sequence[SlotView], budget: int) -> BatchPlan:
        """Both get at least half, if they can use it."""
        decode, prefill = _split(slots)
        half = max(1, budget // 2)
        decode_share = max(half, budget - _sum(_fill(prefill, budget)))
        items = _fill(decode, decode_share)
        return _plan(items, _fill(prefill, budget - _sum(items)))


class Adaptive:
    """Decode first; beside an interactive slot that decodes, only as much prefill as keeps the tick within the target.

    How much that is comes from the measured cost of the last passes. Where decode alone takes longer than the target,
    prefill still gets a minimum. While no interactive slot decodes, nobody waits for the tick and prefill fills it.
    """

    def __init__(self, target_ms: float) -> None:
        """Aim at ticks of `target_ms` milliseconds."""
        self._aim_ms = AIM * target_ms
        self._cost = TickCost()

    def plan(self, slots: Sequence[SlotView], budget: int) -> BatchPlan:
        """Decode first, then the share of prefill."""
        decode, prefill = _split(slots)
        items = _fill(decode, budget)
        rest = budget - _sum(items)
        if any(view.priority == 0 for view in decode):
            rest = min(rest, max(MIN_PREFILL_TOKENS, self._cost.prefill_within(self._aim_ms, len(items))))
        return _plan(items, _fill(prefill, rest))

    def observe(self, plan: BatchPlan, views: Sequence[SlotView], ms: float) -> None:
        """Learn from a pass over `plan`, which was made from `views`, that took `ms` milliseconds."""
        decoding = {view.slot for view in views if view.is_decoding}
        decode = sum(item.slot in decoding for item in plan.items)
        self._cost.learn(decode, plan.tokens - decode, ms)


class WholePrompts:
    """Every sequence whole in one pass, oldest first, as many as the budget takes; for embeddings.

    A pooled embedding is made of what one pass computes, so nothing is ever cut into chunks. What is longer than the
    budget must not get a slot.
    """

    def plan(self, slots: Sequence[SlotView], budget: int) -> BatchPlan:
        """The oldest always fits; a younger one that does not waits for the next pass."""
        items = []
        for view in slots:
            if view.remaining <= budget:
                items.append(PlanItem(view.slot, view.remaining, wants_logits=True))
                budget -= view.remaining
        return BatchPlan(tuple(items))


#: By name: what makes the strategy, given the target of `itl_target_ms`.
STRATEGIES: dict[str, Callable[[float], BatchStrategy]] = {
    "decode_maximal": lambda _target_ms: DecodeMaximal(),
    "prefill_priority": lambda _target_ms: PrefillPriority(),
    "balanced": lambda _target_ms: Balanced(),
    "adaptive": Adaptive,
}


def load_strategy(name: str, itl_target_ms: float = 100.0) -> BatchStrategy:
    """The strategy of a setting: one of ours by name, or anybody's by dotted path.

    Args:
        itl_target_ms: what `adaptive` holds; the others need none.

    Raises:
        ValueError: there is no such name, or the path leads to nothing with a `plan`.
    """
    if name in STRATEGIES:
        return STRATEGIES[name](itl_target_ms)
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"batch_strategy {name!r} is none of {', '.join(STRATEGIES)} and no dotted path")
    try:
        strategy = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"batch_strategy {name!r} cannot be made: {error}") from None
    if not callable(getattr(strategy, "plan", None)):
        raise ValueError(f"batch_strategy {name!r} has no method `plan`")
    return cast(BatchStrategy, strategy)


def _split(slots: Sequence[SlotView]) -> tuple[list[SlotView], list[SlotView]]:
    return [s for s in slots if s.is_decoding], [s for s in slots if not s.is_decoding]


def _fill(slots: Sequence[SlotView], budget: int) -> list[PlanItem]:
    items = []
    for view in slots:
        tokens = min(view.remaining, view.chunk, budget)
        if tokens < 1:
            break
        items.append(PlanItem(view.slot, tokens, wants_logits=tokens == view.remaining))
        budget -= tokens
    return items


def _sum(items: Sequence[PlanItem]) -> int:
    return sum(item.tokens for item in items)


def _plan(first: Sequence[PlanItem], then: Sequence[PlanItem]) -> BatchPlan:
    return BatchPlan((*first, *then))
