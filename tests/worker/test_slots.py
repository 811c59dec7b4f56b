from __future__ import annotations

import pytest

from worker.backend import SamplingParams
from worker.fake_backend import FakeBackend
from worker.requests import Request
from worker.sampler import make_sampler
from worker.slots import SlotPool, SlotState


def request(prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request("r", "x", prompt, SamplingParams(), 4)


def pool_with_one_active() -> SlotPool:
    pool = SlotPool(2)
    pool.acquire(pool.slots[0], request(), make_sampler(FakeBackend(), SamplingParams()), 0, now=1.0)
    return pool


def test_an_acquired_slot_has_the_whole_prompt_to_compute() -> None:
    slot = pool_with_one_active().slots[0]
    assert (slot.state, slot.remaining, slot.generated, slot.is_prefilling) == (SlotState.ACTIVE, 3, 0, True)


def test_a_slot_is_decoding_when_one_token_remains() -> None:
    slot = pool_with_one_active().slots[0]
    slot.computed(3)
    assert slot.append(7, now=2.0) == 0
    assert (slot.remaining, slot.generated, slot.is_prefilling) == (1, 1, False)


def test_illegal_moves_are_refused() -> None:
    pool = pool_with_one_active()
    slot, idle = pool.slots
    with pytest.raises(AssertionError):
        pool.acquire(slot, request(), make_sampler(FakeBackend(), SamplingParams()), 0, now=2.0)
    with pytest.raises(AssertionError):
        pool.release(idle, now=2.0, keep=False)
    with pytest.raises(AssertionError):
        slot.computed(4)
    with pytest.raises(AssertionError):
        slot.append(1, now=2.0)


def test_release_keeps_only_what_is_in_the_cache() -> None:
    pool = pool_with_one_active()
    slot = pool.slots[0]
    slot.computed(3)
    slot.append(9, now=2.0)
    pool.release(slot, now=3.0, keep=True)
    assert (slot.tokens, slot.n_past, slot.request) == ([1, 2, 3], 3, None)
    pool.check_integrity()


def test_release_without_keeping_leaves_nothing() -> None:
    pool = pool_with_one_active()
    pool.release(pool.slots[0], now=3.0, keep=False)
    assert pool.slots[0].tokens == [] and pool.slots[0].n_past == 0
    assert len(pool.idle) == 2


def test_active_slots_come_oldest_admission_first() -> None:
    pool = SlotPool(3)
    for place in (2, 0, 1):
        one = Request(str(place), "x", (1,), SamplingParams(), 4)
        pool.acquire(pool.slots[place], one, make_sampler(FakeBackend(), SamplingParams()), 0, now=1.0)
    assert [slot.seq_id for slot in pool.active] == [2, 0, 1]


def test_integrity_notices_a_changed_prompt_and_a_request_in_two_slots() -> None:
    pool = pool_with_one_active()
    pool.slots[0].tokens[0] = 99
    with pytest.raises(AssertionError, match="prompt changed"):
        pool.check_integrity()
    pool = pool_with_one_active()
    pool.acquire(pool.slots[1], request(), make_sampler(FakeBackend(), SamplingParams()), 0, now=1.0)
    with pytest.raises(AssertionError, match="two slots"):
        pool.check_integrity()
