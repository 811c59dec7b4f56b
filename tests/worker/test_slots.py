from __future__ import annotations

from typing import Any

import pytest

from worker.backend import SamplingParams
from worker.fake_backend import FakeBackend
from worker.requests import HEADROOM_TOKENS, Request
from worker.sampler import Argmax
from worker.slots import Slot, SlotPool, SlotState
from worker.text import transcript_of


def request(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, **fields: Any) -> Request:
    return Request("r", "x", prompt, SamplingParams(), max_tokens, **fields)


def acquire(pool: SlotPool, slot: Slot, wanted: Request) -> None:
    backend = FakeBackend()
    transcript = transcript_of(backend.vocab, wanted.stop, wanted.format, wanted.generated)
    pool.acquire(slot, wanted, Argmax(backend.logits, frozenset(), False), transcript, 0, now=1.0)


def pool_with_one_active(wanted: Request | None = None) -> SlotPool:
    pool = SlotPool(2)
    acquire(pool, pool.slots[0], wanted or request())
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
        acquire(pool, slot, request())
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
        acquire(pool, pool.slots[place], one)
    assert [slot.seq_id for slot in pool.active] == [2, 0, 1]


def test_integrity_notices_a_changed_prompt_and_a_request_in_two_slots() -> None:
    pool = pool_with_one_active()
    pool.slots[0].tokens[0] = 99
    with pytest.raises(AssertionError, match="prompt changed"):
        pool.check_integrity()
    pool = pool_with_one_active()
    acquire(pool, pool.slots[1], request())
    with pytest.raises(AssertionError, match="two slots"):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("wanted", "reserve"),
    [
        (request(max_tokens=400), 403),
        (request(max_tokens=400, expected_tokens=50), 53),
        (request(max_tokens=400, expected_tokens=5), 3 + HEADROOM_TOKENS),
        (request(max_tokens=20, expected_tokens=50), 23),
        (request(max_tokens=400, expected_tokens=50, generated=(7,) * 100), 103 + HEADROOM_TOKENS),
        (request(max_tokens=110, expected_tokens=50, generated=(7,) * 100), 113),
        (request(max_tokens=400, embed=True), 3),
    ],
)
def test_a_request_reserves_what_it_is_expected_to_need_and_more_than_it_has(wanted: Request, reserve: int) -> None:
    assert wanted.reserve == reserve
    assert pool_with_one_active(wanted).reserved == reserve


def test_the_reserve_of_a_slot_grows_with_its_answer() -> None:
    pool = pool_with_one_active(request(max_tokens=400, expected_tokens=4))
    slot = pool.slots[0]
    slot.computed(3)
    slot.append(9, now=2.0)
    assert slot.reserve == 4 + HEADROOM_TOKENS


def test_an_answer_is_over_at_its_last_token_at_a_stop_string_and_at_the_end_of_a_grammar() -> None:
    goes_on = pool_with_one_active(request(generated=(4, 5, 6))).slots[0]
    assert goes_on.finish_reason is None
    assert pool_with_one_active(request(generated=(4, 5, 6, 7))).slots[0].finish_reason == "length"
    stopped = request(generated=(ord("a"), ord("b")), stop=("ab",))
    assert pool_with_one_active(stopped).slots[0].finish_reason == "stop"
