from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batching import STRATEGIES, Balanced, BatchPlan, DecodeMaximal, PrefillPriority, SlotView, load_strategy

VIEWS = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 512)), max_size=16).map(
    lambda rows: [SlotView(i, remaining, chunk) for i, (remaining, chunk) in enumerate(rows)]
)


def shares(plan: BatchPlan) -> dict[int, int]:
    return {item.slot: item.tokens for item in plan.items}


@pytest.mark.parametrize("name", STRATEGIES)
@given(views=VIEWS, extra=st.integers(0, 4096))
def test_every_plan_keeps_the_rules(name: str, views: list[SlotView], extra: int) -> None:
    budget = max(1, len(views)) + extra
    plan = load_strategy(name).plan(views, budget)
    assert plan.tokens <= budget
    assert len(shares(plan)) == len(plan.items)
    by_slot = {v.slot: v for v in views}
    for item in plan.items:
        view = by_slot[item.slot]
        assert 1 <= item.tokens <= min(view.remaining, view.chunk)
        assert item.wants_logits == (item.tokens == view.remaining)
    assert bool(plan.items) == bool(views)


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


class Own:
    def plan(self, slots: object, budget: int) -> BatchPlan:
        return BatchPlan()


def test_a_dotted_path_leads_to_ones_own_strategy() -> None:
    assert isinstance(load_strategy("tests.worker.test_batching.Own"), Own)


@pytest.mark.parametrize("name", ["fastest", "no.such.module", "json.JSONDecoder", "tests.worker.test_batching.Gone"])
def test_a_strategy_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        load_strategy(name)
