from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ContextLengthExceeded
from tests.worker.engine_harness import Harness, alone
from worker.backend import DecodeOutcome, SamplingParams
from worker.fake_backend import FakeBackend
from worker.requests import HEADROOM_TOKENS, Started

HOT = SamplingParams(temperature=0.8, seed=42)


def pauses(harness: Harness) -> int:
    """Times that a request had to let go of its slot for want of room."""
    starts = [e.request.id for e in harness.events if isinstance(e, Started)]
    return len(starts) - len(set(starts))


def test_requests_that_may_fill_the_context_run_beside_each_other() -> None:
    harness = Harness(FakeBackend("babble", n_ctx=1024, n_parallel=4))
    for i in range(4):
        harness.submit(f"r{i}", "z" * 100, max_tokens=900, expected_tokens=100)
    harness.tick()
    assert len(harness.engine.pool.active) == 4


def test_four_requests_that_fill_a_cache_of_a_quarter_of_their_size_all_end_as_alone() -> None:
    harness = Harness(FakeBackend("babble", n_ctx=500, n_parallel=4))
    for i in range(4):
        harness.submit(f"r{i}", f"{i}" * 40, max_tokens=460, expected_tokens=40, params=HOT)
    harness.run(20_000)
    for i in range(4):
        assert harness.text(f"r{i}") == alone(f"r{i}", f"{i}" * 40, max_tokens=460, params=HOT).text(f"r{i}")
        assert [t.index for t in harness.tokens(f"r{i}")] == list(range(460))
    # Whoever pauses waits until another one ends, so there are fewer than one for each pair of requests.
    assert 1 <= pauses(harness) <= 4 * 3 / 2


def test_a_paused_request_comes_back_only_where_it_can_get_on() -> None:
    harness = Harness(FakeBackend("babble", n_ctx=300, n_parallel=2))
    for name in "ab":
        harness.submit(name, "z" * 20, max_tokens=250, expected_tokens=10)
    while pauses(harness) == 0:
        harness.tick()
        active = harness.engine.pool.active
        if len(active) == 1 and harness.engine.waiting:
            (waiting,) = harness.engine.waiting
            assert waiting.reserve == 20 + min(250, len(waiting.generated) + HEADROOM_TOKENS)
    assert harness.ended("a").stats.generated_tokens == 250
    harness.run()
    assert harness.ended("b").stats.generated_tokens == 250


def test_no_pass_is_made_in_vain() -> None:
    harness = Harness(FakeBackend("babble", n_ctx=500, n_parallel=4))
    refused = [0]
    decode = harness.backend.decode

    def counting(items: object) -> DecodeOutcome:
        outcome = decode(items)  # type: ignore[arg-type]
        refused[0] += outcome is DecodeOutcome.NO_ROOM
        return outcome

    harness.backend.decode = counting  # type: ignore[method-assign]
    for i in range(4):
        harness.submit(f"r{i}", "z" * 40, max_tokens=460, expected_tokens=40)
    harness.run(20_000)
    # The engine knows the cells as well as the model does, and makes room before it asks.
    assert refused[0] == 0 and 1 <= pauses(harness) <= 6


@pytest.mark.parametrize("kv_unified", [True, False])
def test_what_can_never_fit_is_refused_with_the_numbers_and_holds_nobody_up(kv_unified: bool) -> None:
    harness = Harness(FakeBackend("babble", n_ctx=400, n_parallel=4, kv_unified=kv_unified))
    room = 400 if kv_unified else 100
    harness.submit("never", "z" * 50, max_tokens=room - 49, expected_tokens=10)
    harness.submit("just", "z" * 50, max_tokens=room - 50, expected_tokens=10)
    harness.run()
    error = harness.ended("never").error
    assert isinstance(error, ContextLengthExceeded)
    assert str(room + 1) in error.message and str(room) in error.message
    assert harness.ended("just").stats.generated_tokens == room - 50


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100), st.integers(1, 30)), min_size=1, max_size=6))
def test_any_mix_ends_as_alone_with_bounded_pauses(work: list[tuple[int, int, int]]) -> None:
    harness = Harness(FakeBackend("babble", n_ctx=142, n_parallel=4, n_batch=64), chunk_size=16)
    for i, (prompt, most, expected) in enumerate(work):
        harness.submit(f"r{i}", "z" * prompt, max_tokens=most, expected_tokens=expected, cache_prompt=bool(i % 2))
    harness.run(20_000)
    for i, (prompt, most, _) in enumerate(work):
        assert harness.ended(f"r{i}").error is None
        assert harness.text(f"r{i}") == alone(f"r{i}", "z" * prompt, max_tokens=most).text(f"r{i}")
    assert pauses(harness) <= 3 * len(work)
