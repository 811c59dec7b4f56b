from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batching import (
    MIN_PREFILL_TOKENS,
    STRATEGIES,
    Adaptive,
    Balanced,
    BatchPlan,
    DecodeMaximal,
    PrefillPriority,
    SlotView,
    load_strategy,
)

VIEWS = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 512), st.integers(0, 2)), max_size=16).map(
    lambda rows: [SlotView(i, *row) for i, row in enumerate(sorted(rows, key=lambda row: row[2]))]
)


def shares(plan: BatchPlan) -> dict[int, int]:
    return {item.slot: item.tokens for item in plan.items}


def assert_legal(plan: BatchPlan, views: list[SlotView], budget: int) -> None:
    """The plan is one that a strategy may make."""
    assert plan.tokens <= budget
    assert len(shares(plan)) == len(plan.items)
    by_slot = {v.slot: v for v in views}
    for item in plan.items:
        view = by_slot[item.slot]
        assert 1 <= item.tokens <= min(view.remaining, view.chunk)
        assert item.wants_logits == (item.tokens == view.remaining)
    assert bool(plan.items) == bool(views)


@pytest.mark.parametrize("name", STRATEGIES)
@given(views=VIEWS, extra=st.integers(0, 4096))
def test_every_plan_keeps_the_rules(name: str, views: list[SlotView], extra: int) -> None:
    budget = max(1, len(views)) + extra
    assert_legal(load_strategy(name).plan(views, budget), views, budget)


@given(st.lists(st.tuples(VIEWS, st.integers(0, 4096), st.floats(0, 1e5)), max_size=12), st.floats(0.1, 60_000))
def test_every_adaptive_plan_keeps_the_rules_whatever_was_measured(
    ticks: list[tuple[list[SlotView], int, float]], target_ms: float
) -> None:
    strategy = Adaptive(target_ms)
    for views, extra, ms in ticks:
        budget = max(1, len(views)) + extra
        plan = strategy.plan(views, budget)
        assert_legal(plan, views, budget)
        assert {v.slot for v in views if v.is_decoding} <= shares(plan).keys()
        if plan.items:
            strategy.observe(plan, views, ms)


@given(views=VIEWS, extra=st.integers(0, 4096))
def test_decode_maximal_gives_every_decoding_slot_its_token(views: list[SlotView], extra: int) -> None:
    plan = DecodeMaximal().plan(views, len(views) + extra + 1)
    assert {v.slot for v in views if v.is_decoding} <= shares(plan).keys()


DECODING = [SlotView(0, 1, 512), SlotView(1, 1, 512)]


def test_decode_maximal_fills_the_budget_with_prefill() -> None:
    plan = DecodeMaximal().plan([*DECODING, SlotView(2, 2000, 512), SlotView(3, 700, 512)], 600)
    assert shares(plan) == {0: 1, 1: 1, 2: 512, 3: 86}


def test_prefill_priority_lets_decoding_wait_for_chunks() -> None:
    plan = PrefillPriority().plan([*DECODING, SlotView(2, 2000, 512)], 513)
    assert shares(plan) == {2: 512, 0: 1}


def test_balanced_splits_the_budget_equally() -> None:
    views = [SlotView(i, 1, 512) for i in range(8)] + [SlotView(8, 2000, 512)]
    assert shares(Balanced().plan(views, 10)) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 8: 5}


def test_balanced_hands_unused_halves_over() -> None:
    assert shares(Balanced().plan([*DECODING, SlotView(2, 2000, 512)], 100)) == {0: 1, 1: 1, 2: 98}
    views = [SlotView(i, 1, 512) for i in range(8)] + [SlotView(8, 2, 512)]
    assert shares(Balanced().plan(views, 10))[7] == 1


@dataclass
class Machine:
    """Runs a strategy on ticks that cost `fixed + decode * d + prefill * p` milliseconds, give or take `noise`.

    There is always a long prompt of a batch job to prefill.
    """

    fixed: float
    decode: float
    prefill: float
    noise: float = 0.08
    target_ms: float = 100.0
    decoding: Callable[[int], int] = lambda tick: 4
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.strategy = Adaptive(self.target_ms)
        self.ticks = 0

    def run(self, ticks: int, priority: int = 0) -> list[tuple[float, int]]:
        """Milliseconds and prefill tokens of each tick."""
        done = []
        for _ in range(ticks):
            views = [SlotView(i, 1, 512, priority) for i in range(self.decoding(self.ticks))]
            views.append(SlotView(99, 3000, 512, 2))
            plan = self.strategy.plan(views, 600)
            prefill = shares(plan).get(99, 0)
            cost = self.cost(len(views) - 1, prefill) * self.chance.uniform(1 - self.noise, 1 + self.noise)
            self.strategy.observe(plan, views, cost)
            done.append((cost, prefill))
            self.ticks += 1
        return done

    def cost(self, decode: int, prefill: int) -> float:
        return self.fixed + self.decode * decode + self.prefill * prefill

    def slow_down(self, factor: float) -> None:
        self.fixed, self.decode, self.prefill = (factor * part for part in (self.fixed, self.decode, self.prefill))

    @property
    def possible(self) -> float:
        """Prefill tokens that the target allows beside 4 decode tokens."""
        return max(MIN_PREFILL_TOKENS, min(512.0, (self.target_ms - self.cost(4, 0)) / self.prefill))


def holds(ticks: list[tuple[float, int]], target_ms: float) -> bool:
    return statistics.median(ms for ms, _ in ticks) <= 1.1 * target_ms


def prefill_rate(ticks: list[tuple[float, int]]) -> float:
    return statistics.mean(prefill for _, prefill in ticks)


@pytest.mark.parametrize(
    "machine",
    [
        Machine(5.0, 2.5, 1.3),
        Machine(8.0, 0.1, 0.02),
        Machine(40.0, 4.0, 2.5),
        Machine(5.0, 2.5, 1.3, noise=0.3),
        Machine(5.0, 0.5, 0.2, target_ms=30.0),
        Machine(50.0, 10.0, 4.0, target_ms=1000.0),
    ],
)
def test_adaptive_holds_the_target_and_uses_what_it_allows(machine: Machine) -> None:
    machine.run(4)
    ticks = machine.run(100)
    assert holds(ticks, machine.target_ms)
    assert prefill_rate(ticks) >= 0.8 * machine.possible


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 3.0])
def test_adaptive_follows_a_machine_that_changes_its_speed(factor: float) -> None:
    machine = Machine(5.0, 2.0, 0.8)
    machine.run(50)
    machine.slow_down(factor)
    machine.run(5)
    ticks = machine.run(50)
    assert holds(ticks, machine.target_ms)
    assert prefill_rate(ticks) >= 0.8 * machine.possible


def test_adaptive_holds_the_target_while_slots_come_and_go() -> None:
    machine = Machine(5.0, 2.5, 1.3, decoding=lambda tick: 1 if tick // 5 % 2 else 16)
    machine.run(20)
    ticks = machine.run(200)
    assert holds(ticks, machine.target_ms)
    assert statistics.median(ms for ms, _ in ticks) >= 0.8 * machine.target_ms


def test_adaptive_is_not_misled_by_single_ticks() -> None:
    machine = Machine(5.0, 2.5, 1.3, noise=0.0)
    machine.run(20)
    usual = prefill_rate(machine.run(1))
    machine.slow_down(20)
    machine.run(1)
    machine.slow_down(1 / 20)
    assert prefill_rate(machine.run(1)) == pytest.approx(usual, abs=1)


def test_adaptive_lets_prefill_go_on_where_decode_alone_is_too_slow() -> None:
    machine = Machine(200.0, 10.0, 4.0)
    machine.run(5)
    assert {prefill for _, prefill in machine.run(20)} == {MIN_PREFILL_TOKENS}


def test_adaptive_uses_the_whole_budget_while_no_interactive_slot_decodes() -> None:
    machine = Machine(5.0, 2.5, 1.3)
    assert {prefill for _, prefill in machine.run(20, priority=1)} == {512}
    idle = [SlotView(0, 200, 512, 0), SlotView(1, 1, 512, 1), SlotView(2, 3000, 512, 1)]
    assert shares(machine.strategy.plan(idle, 600)) == {0: 200, 1: 1, 2: 399}


def test_adaptive_gives_the_minimum_before_anything_was_measured() -> None:
    plan = Adaptive(100.0).plan([SlotView(0, 1, 512, 0), SlotView(1, 3000, 512, 1)], 600)
    assert shares(plan) == {0: 1, 1: MIN_PREFILL_TOKENS}


def test_the_target_comes_from_the_setting() -> None:
    views = [SlotView(0, 1, 512, 0), SlotView(1, 3000, 512, 1)]
    given = []
    for target_ms in (50.0, 200.0):
        strategy = load_strategy("adaptive", target_ms)
        assert isinstance(strategy, Adaptive)
        strategy.observe(strategy.plan(views[:1], 600), views[:1], 9.0)
        given.append(shares(strategy.plan(views, 600))[1])
    # 9 ms for one decode token is estimated as 8 ms and 1 ms a token.
    assert given == [pytest.approx(0.95 * 50 - 9, abs=1), pytest.approx(0.95 * 200 - 9, abs=1)]


class Own:
    def plan(self, slots: object, budget: int) -> BatchPlan:
        return BatchPlan()


def test_a_dotted_path_leads_to_ones_own_strategy() -> None:
    assert isinstance(load_strategy("tests.worker.test_batching.Own"), Own)


@pytest.mark.parametrize("name", ["fastest", "no.such.module", "json.JSONDecoder", "tests.worker.test_batching.Gone"])
def test_a_strategy_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        load_strategy(name)
