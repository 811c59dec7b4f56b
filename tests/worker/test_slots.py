from __future__ import annotations

from typing import Any

import pytest

from worker.backend import BatchItem, SamplingParams
from worker.fake_backend import FakeBackend
from worker.prefix_cache import PrefixCache
from worker.requests import EXPECTED_TOKENS, HEADROOM_TOKENS, Request
from worker.sampler import Argmax
from worker.slots import Slot, SlotPool, SlotState
from worker.text import transcript_of
from worker.waiting import WaitingLine


def request(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, **fields: Any) -> Request:
    return Request("r", "x", prompt, SamplingParams(), max_tokens, **fields)


class Pool(SlotPool):
    """Slots with a cache of their own, to be filled by hand."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.backend = FakeBackend(n_parallel=size)
        self.cache = PrefixCache(self.backend)
        self.line = WaitingLine()

    def give(self, wanted: Request, now: float = 1.0) -> Slot:
        transcript = transcript_of(self.backend.vocab, wanted.stop, wanted.format, wanted.generated)
        self.line.add(wanted)
        sequence = self.cache.begin(wanted, self.cache.find(wanted))
        sampler = Argmax(self.backend.logits, frozenset(), False)
        return self.acquire(self.line.next(), sequence, sampler, transcript, now)

    def compute(self, slot: Slot) -> None:
        """All that remains of a slot."""
        assert slot.sequence is not None
        self.backend.decode([BatchItem(slot.sequence.seq_id, slot.n_past, slot.tokens[slot.n_past :], True)])
        self.cache.computed(slot.sequence, slot.remaining)

    def append(self, slot: Slot, token: int) -> None:
        assert slot.sequence is not None
        self.cache.append(slot.sequence, token)


def test_an_acquired_slot_has_the_whole_prompt_to_compute() -> None:
    slot = Pool(2).give(request())
    assert (slot.state, slot.remaining, slot.generated, slot.is_prefilling) == (SlotState.ACTIVE, 3, 0, True)


def test_a_slot_is_decoding_when_one_token_remains() -> None:
    pool = Pool(2)
    slot = pool.give(request())
    pool.compute(slot)
    pool.append(slot, 7)
    assert (slot.remaining, slot.generated, slot.is_prefilling) == (1, 1, False)


def test_a_slot_that_is_not_in_use_cannot_be_released_nor_more_computed_than_is_known() -> None:
    pool = Pool(2)
    slot = pool.give(request())
    assert slot.sequence is not None
    with pytest.raises(AssertionError, match="not in use"):
        pool.release(pool.slots[1])
    with pytest.raises(AssertionError, match="4 of 3"):
        pool.cache.computed(slot.sequence, 4)


def test_a_released_slot_is_empty_and_its_sequence_is_the_callers() -> None:
    pool = Pool(2)
    wanted = request()
    slot = pool.give(wanted)
    sequence = slot.sequence
    assert pool.release(slot) == (wanted, sequence)
    assert (slot.state, slot.tokens, slot.n_past, slot.need) == (SlotState.IDLE, [], 0, 0)
    pool.check_integrity()


def test_active_slots_come_oldest_admission_first() -> None:
    pool = Pool(3)
    for name in "abc":
        pool.give(Request(name, "x", (1,), SamplingParams(), 4))
    pool.release(pool.slots[0])
    pool.give(Request("d", "x", (1,), SamplingParams(), 4))
    assert [slot.request.id for slot in pool.active if slot.request] == ["b", "c", "d"]
    assert pool.slots[0].request is not None and pool.slots[0].request.id == "d"


def test_integrity_notices_a_changed_prompt_and_a_request_in_two_slots() -> None:
    pool = Pool(2)
    pool.give(request()).tokens[0] = 99
    with pytest.raises(AssertionError, match="prompt changed"):
        pool.check_integrity()
    pool = Pool(2)
    pool.give(request())
    pool.give(request())
    with pytest.raises(AssertionError, match="two slots"):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("wanted", "reserve"),
    [
        (request(max_tokens=200), 203),
        (request(max_tokens=4000), 3 + EXPECTED_TOKENS),
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
    assert Pool(2).give(wanted).need == reserve


def test_what_a_slot_needs_falls_with_what_it_has_and_grows_with_its_answer() -> None:
    pool = Pool(2)
    slot = pool.give(request(max_tokens=400, expected_tokens=4))
    pool.compute(slot)
    assert slot.need == HEADROOM_TOKENS
    for token in range(HEADROOM_TOKENS):
        pool.append(slot, token)
        pool.compute(slot)
    assert slot.need == HEADROOM_TOKENS


def test_an_answer_is_over_at_its_last_token_at_a_stop_string_and_at_the_end_of_a_grammar() -> None:
    def slot(wanted: Request) -> Slot:
        return Pool(2).give(wanted)

    assert slot(request(generated=(4, 5, 6))).finish_reason is None
    assert slot(request(generated=(4, 5, 6, 7))).finish_reason == "length"
    assert slot(request(generated=(ord("a"), ord("b")), stop=("ab",))).finish_reason == "stop"
