from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.tick_cost import TickCost


def test_before_anything_is_measured_nothing_is_promised() -> None:
    cost = TickCost()
    assert cost.of(8, 512) == 0
    assert cost.prefill_within(1000.0, 4) == 0


@pytest.mark.parametrize(("decode", "prefill"), [(1, 0), (0, 512), (8, 100)])
def test_one_pass_is_enough_for_a_first_estimate(decode: int, prefill: int) -> None:
    cost = TickCost()
    cost.learn(decode, prefill, 80.0)
    assert cost.of(decode, prefill) == pytest.approx(80.0)
    assert cost.prefill_within(80.0, decode) == pytest.approx(prefill, abs=1)


def test_the_parts_of_the_cost_are_told_apart_by_passes_of_different_make_up() -> None:
    chance, cost = random.Random(1), TickCost()
    for _ in range(300):
        decode, prefill = chance.randint(1, 16), chance.choice([0, 0, 32, 128])
        cost.learn(decode, prefill, 6.0 + 2.0 * decode + 1.5 * prefill)
    for decode, prefill in ((1, 0), (16, 0), (4, 32), (8, 200)):
        assert cost.of(decode, prefill) == pytest.approx(6.0 + 2.0 * decode + 1.5 * prefill, rel=0.1)


def test_one_pass_that_is_far_off_changes_nothing_and_a_second_does() -> None:
    cost = TickCost()
    for _ in range(3):
        cost.learn(4, 0, 20.0)
    before = cost.of(4, 0)
    cost.learn(4, 0, 900.0)
    assert cost.of(4, 0) == before
    cost.learn(4, 0, 20.0)
    cost.learn(4, 0, 900.0)
    assert cost.of(4, 0) == pytest.approx(before)
    cost.learn(4, 0, 900.0)
    assert before * 1.4 < cost.of(4, 0) <= before * 1.5


def test_a_wrong_guess_about_prefill_is_mended_though_passes_without_come_between() -> None:
    """Each pass with prefill is far off, each one between is as expected."""
    cost = TickCost()
    for _ in range(10):
        cost.learn(1, 0, 8.0)
        cost.learn(1, 100, 1000.0)
    assert cost.of(1, 100) == pytest.approx(1000.0, rel=0.1)
    assert cost.of(1, 0) == pytest.approx(8.0, rel=0.3)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 2048), st.floats(0, 1e6)), max_size=60))
def test_estimates_stay_numbers_above_zero_whatever_is_measured(passes: list[tuple[int, int, float]]) -> None:
    cost = TickCost()
    for decode, prefill, ms in passes:
        cost.learn(decode, prefill, ms)
        assert 0 < cost.of(1, 1) < float("inf")
        assert 0 < cost.of(0, 0) < cost.of(1, 0) < cost.of(1, 1)
        assert cost.prefill_within(50.0, 4) >= 0
