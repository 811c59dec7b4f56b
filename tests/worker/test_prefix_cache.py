"""Where a request begins: passes are what the scripted model was really asked to compute."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.engine_harness import Harness, alone
from worker import prefix_cache
from worker.backend import SamplingParams
from worker.fake_backend import FakeBackend
from worker.requests import Ended

LONG = "the same words at the beginning of every prompt, again and again. " * 3
HOT = SamplingParams(temperature=0.8, seed=42)


def harness(n_parallel: int = 4, *, chunk_size: int = 512, **backend: Any) -> Harness:
    return Harness(FakeBackend("babble", n_parallel=n_parallel, **backend), chunk_size=chunk_size)


def computed(h: Harness) -> int:
    """Tokens in all passes so far."""
    return sum(len(item.tokens) for items in h.backend.passes for item in items)


def cached(h: Harness, name: str) -> int:
    return h.ended(name).stats.cached_tokens


def assert_as_alone(h: Harness, prompts: dict[str, str], **options: Any) -> None:
    for name, prompt in prompts.items():
        assert h.text(name) == alone(name, prompt, **options).text(name)


def test_a_request_begins_where_a_finished_one_with_the_same_prefix_parted() -> None:
    h = harness()
    h.submit("a", LONG + "one", cache_prompt=True)
    h.run()
    before = computed(h)
    h.submit("b", LONG + "two", cache_prompt=True)
    h.run()
    assert cached(h, "b") == len(LONG)
    assert computed(h) - before == len("two") + 15
    assert_as_alone(h, {"a": LONG + "one", "b": LONG + "two"})


def test_a_request_begins_with_the_prompt_and_the_answer_of_one_that_still_runs() -> None:
    h = harness()
    h.submit("a", LONG, cache_prompt=True, max_tokens=60)
    h.tick(20)
    answer = [t.token for t in h.tokens("a") if t.token is not None]
    prompt = [*LONG.encode(), *answer[:15], ord("x")]
    h.submit("b", tokens=tuple(prompt), cache_prompt=True)
    h.run()
    assert cached(h, "b") == len(LONG) + 15
    assert h.text("b") == alone("b", tokens=tuple(prompt)).text("b")
    assert_as_alone(h, {"a": LONG}, max_tokens=60)


def test_requests_that_come_together_compute_their_common_prefix_once() -> None:
    h = harness(chunk_size=50)
    prompts = {name: LONG + name * 5 for name in "abcd"}
    for name, prompt in prompts.items():
        h.submit(name, prompt, cache_prompt=True, max_tokens=5)
    h.run()
    assert computed(h) == len(LONG) + 4 * (5 + 4)
    assert sorted(cached(h, name) for name in "abcd") == [0, *[len(LONG)] * 3]
    assert_as_alone(h, prompts, max_tokens=5)


def test_equal_prompts_are_computed_once_but_for_their_last_token() -> None:
    """The choices of one request: the same prompt, each with a seed of its own."""
    h = harness()
    for seed in range(4):
        h.submit(f"c{seed}", LONG, cache_prompt=True, max_tokens=6, params=SamplingParams(temperature=1, seed=seed))
    h.run()
    assert computed(h) == len(LONG) + 3 + 4 * 5
    for seed in range(4):
        params = SamplingParams(temperature=1, seed=seed)
        assert h.text(f"c{seed}") == alone("c", LONG, max_tokens=6, params=params).text("c")


def test_who_waits_for_a_prefill_goes_on_by_itself_when_that_is_cancelled() -> None:
    h = harness(chunk_size=20)
    prompts = {name: LONG + name for name in "abc"}
    for name, prompt in prompts.items():
        h.submit(name, prompt, cache_prompt=True)
    h.tick(3)
    h.engine.cancel("execution-a")
    h.run()
    assert h.ended("a").finish_reason == "cancelled"
    assert computed(h) == len(LONG) + 2 * (1 + 15)  # what `a` had computed was not lost either
    assert_as_alone(h, {name: prompts[name] for name in "bc"})


def test_who_waits_for_a_prefill_goes_on_by_itself_when_that_fails() -> None:
    h = harness(chunk_size=20)
    for name in "abc":
        h.submit(name, LONG + name, cache_prompt=True)
    h.tick(2)
    sequence = h.engine.pool.active[0].sequence
    assert sequence is not None
    h.engine.pool.active[0].sampler.sample = broken  # type: ignore[union-attr, method-assign]
    h.backend.poison[sequence.seq_id] = float("nan")
    h.run()
    assert h.ended("a").error is not None
    assert_as_alone(h, {name: LONG + name for name in "bc"})


def broken(row: int, index: int) -> int:
    raise AssertionError("not asked of a row without a finite logit")


def test_at_least_one_token_is_computed() -> None:
    h = harness()
    for name in "ab":
        h.submit(name, LONG, cache_prompt=True, max_tokens=1)
        h.run()
    assert cached(h, "b") == len(LONG) - 1
    assert_as_alone(h, {"b": LONG}, max_tokens=1)


@pytest.mark.parametrize("first", [True, False])
def test_a_request_that_wants_no_cache_neither_takes_nor_leaves_a_prefix(first: bool) -> None:
    h = harness()
    h.submit("a", LONG, cache_prompt=first)
    h.run()
    assert (h.engine.cache.tokens > 0) == first
    h.submit("b", LONG, cache_prompt=not first)
    h.run()
    assert cached(h, "b") == 0


def test_a_conversation_goes_on_in_its_own_sequence() -> None:
    h = harness()
    prompt: tuple[int, ...] = tuple(b"first turn")
    for turn in range(4):
        name = f"t{turn}"
        h.submit(name, tokens=prompt, cache_prompt=True, max_tokens=8)
        h.run()
        # The last token of an answer is never computed.
        assert cached(h, name) == (0 if turn == 0 else len(prompt) - len(b"next") - 1)
        prompt += (*(t.token for t in h.tokens(name) if t.token is not None), *b"next")
    assert {i.seq_id for items in h.backend.passes for i in items} == {0}
    assert h.engine.cache.tokens == h.engine.cache.used


def test_what_was_used_least_recently_is_evicted_first_and_from_its_end() -> None:
    h = harness(n_ctx=1000, n_parallel=2)
    for name in "abc":
        h.submit(name, name * 299, cache_prompt=True, max_tokens=2)
        h.run()
    h.submit("again", "a" * 299 + "!", cache_prompt=True, max_tokens=2)  # now b is the oldest
    h.run()
    h.submit("big", "z" * 250, cache_prompt=True, max_tokens=2)
    h.run()
    kept = {chr(tokens[0]): sum(t == tokens[0] for t in tokens) for tokens in h.backend.cache if tokens}
    assert kept["a"] == kept["c"] == 299
    assert 64 <= kept["b"] < 299  # its beginning is still good for something


def test_no_more_prefixes_are_kept_than_there_are_sequences() -> None:
    h = harness(n_parallel=2, cached_prefixes=3)
    for i in range(12):
        h.submit(f"r{i}", f"{i:02} is a prompt of its own", cache_prompt=True, max_tokens=2)
        h.run()
    assert sum(bool(tokens) for tokens in h.backend.cache) <= 5
    h.submit("last", "11 is a prompt of its own!", cache_prompt=True, max_tokens=2)
    h.run()
    assert cached(h, "last") == len("11 is a prompt of its own")


def test_a_prefix_that_another_sequence_holds_too_is_kept_once() -> None:
    h = harness()
    for name in "ab":
        h.submit(name, LONG, cache_prompt=True, max_tokens=4)
        h.run()
    assert sum(bool(tokens) for tokens in h.backend.cache) == 1
    assert h.engine.cache.used == len(LONG) + 3


def test_a_model_that_cannot_cut_computes_the_whole_prompt_unless_it_goes_on_from_the_very_end() -> None:
    h = harness(n_parallel=2, cannot_cut=True)
    h.submit("a", LONG + "one", cache_prompt=True, max_tokens=4)
    h.run()
    h.submit("b", LONG + "two", cache_prompt=True, max_tokens=4)
    h.run()
    assert cached(h, "b") == 0
    kept = next(list(tokens) for tokens in h.backend.cache if tokens)
    h.submit("c", tokens=(*kept, *b"more"), cache_prompt=True, max_tokens=4)
    h.run()
    assert cached(h, "c") == len(kept)
    assert_as_alone(h, {"a": LONG + "one", "b": LONG + "two"}, max_tokens=4)
    assert h.text("c") == alone("c", tokens=(*kept, *b"more"), max_tokens=4).text("c")


def test_a_split_cache_goes_on_in_a_kept_sequence_and_copies_a_running_one() -> None:
    h = harness(n_ctx=4 * 400, kv_unified=False)
    h.submit("a", LONG + "one", cache_prompt=True, max_tokens=30)
    h.tick(5)
    h.submit("b", LONG + "two", cache_prompt=True, max_tokens=4)
    h.run()
    assert cached(h, "b") == len(LONG)
    h.submit("c", LONG + "three", cache_prompt=True, max_tokens=4)
    h.run()
    assert cached(h, "c") >= len(LONG)
    assert_as_alone(h, {"a": LONG + "one"}, max_tokens=30)
    assert_as_alone(h, {"b": LONG + "two", "c": LONG + "three"}, max_tokens=4)


def test_a_shared_prefix_counts_once_when_room_is_reckoned() -> None:
    h = harness(n_ctx=400)
    for i in range(4):
        h.submit(f"r{i}", LONG + str(i), cache_prompt=True, max_tokens=40)
    h.tick()
    assert len(h.engine.pool.active) == 4  # 4 x (193 + 40) cells would be 932
    h.run()
    assert all(isinstance(e, Ended) and e.error is None for e in h.events if isinstance(e, Ended))


def test_the_first_start_is_what_counts_as_cached() -> None:
    """A request that paused finds its own prompt again, which nobody should be told was cached."""
    h = harness(n_parallel=1)
    h.submit("batch", LONG, cache_prompt=True, priority=2)
    h.tick(4)
    h.submit("urgent", "hi", priority=0, max_tokens=3)
    h.run()
    assert cached(h, "batch") == 0
    assert computed(h) == len(LONG) + 2 + 15 + 2  # and nothing was computed twice
    assert_as_alone(h, {"batch": LONG})


def test_what_is_never_asked_for_again_makes_way_for_the_speed_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "START_CREDIT", 4096)
    monkeypatch.setattr(prefix_cache, "RENT_TOKENS", 100_000)
    h = harness(n_ctx=8192, n_parallel=2, cached_prefixes=60)
    for i in range(20):
        h.submit(f"r{i}", f"{i:03}" * 60, cache_prompt=True, max_tokens=2)
    h.run()
    assert h.engine.cache.tokens >= 19 * 180  # it is not known yet that nothing will come of it
    monkeypatch.setattr(prefix_cache, "RENT_TOKENS", 500)
    for i in range(10):
        h.submit(f"s{i}", f"{i:03}+" * 10, cache_prompt=True, max_tokens=200)
    h.run()
    assert h.engine.cache.tokens <= 2 * prefix_cache.FREE_CELLS


def test_what_is_asked_for_again_and_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "RENT_TOKENS", 500)
    h = harness(n_ctx=8192, n_parallel=2, cached_prefixes=60)
    h.submit("first", LONG * 5, cache_prompt=True, max_tokens=2)
    h.run()
    for i in range(10):
        h.submit(f"s{i}", f"{i:03}+" * 10, cache_prompt=True, max_tokens=200)
        h.submit(f"again{i}", LONG * 5 + f"{i} times", cache_prompt=True, max_tokens=2)
        h.run()
        assert cached(h, f"again{i}") >= len(LONG * 5)


# --- where each sequence has a buffer of its own ---

OTHER = "quite another text, which has nothing in common with that. " * 3


def split(n_parallel: int = 2, **backend: Any) -> Harness:
    return harness(n_parallel, n_ctx=n_parallel * 400, kv_unified=False, **backend)


def say(h: Harness, name: str, prompt: str) -> None:
    h.submit(name, prompt, cache_prompt=True, max_tokens=4)
    h.run()
    assert h.text(name) == alone(name, prompt, max_tokens=4).text(name)


def seq_ids(h: Harness) -> list[int]:
    return [item.seq_id for item in h.backend.passes[-1]]


def test_more_prefixes_are_kept_than_a_split_cache_has_sequences() -> None:
    h = split()
    prompts = [f"prompt {i}: {LONG}" for i in range(5)]
    for i, prompt in enumerate(prompts):
        say(h, f"first {i}", prompt)
    for i, prompt in enumerate(prompts):
        say(h, f"again {i}", prompt)
        assert cached(h, f"again {i}") == len(prompt) - 1


def test_the_oldest_parked_prefixes_go_first() -> None:
    h = split(cached_prefixes=2)
    for i in range(5):  # two are kept in the cache, two outside
        say(h, f"first {i}", f"prompt {i}: {LONG}")
    say(h, "oldest", f"prompt 0: {LONG}")
    assert cached(h, "oldest") == 0
    say(h, "newest", f"prompt 4: {LONG}")
    assert cached(h, "newest") > len(LONG)


def test_what_is_parked_takes_no_more_than_a_part_of_what_the_cache_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "PARKED_SHARE", 0.16)  # of 2 x 400 tokens of 16 bytes: two of these
    h = split()
    for i in range(6):
        say(h, f"first {i}", f"prompt {i}: {LONG}")
    say(h, "third", f"prompt 2: {LONG}")
    assert cached(h, "third") > len(LONG)
    say(h, "first", f"prompt 0: {LONG}")
    assert cached(h, "first") == 0


def test_a_prefix_that_cannot_be_put_back_is_computed_again() -> None:
    h = split()
    for i in range(3):
        say(h, f"first {i}", f"prompt {i}: {LONG}")
    h.backend.failing_puts = 1
    say(h, "again", f"prompt 0: {LONG}")
    assert (cached(h, "again"), h.backend.failing_puts) == (0, 0)


def test_a_model_that_cannot_be_cut_parks_nothing() -> None:
    h = split(cannot_cut=True)
    for i in range(4):
        say(h, f"first {i}", f"prompt {i}: {LONG}")
    say(h, "again", f"prompt 0: {LONG}")
    assert cached(h, "again") == 0


def test_a_short_match_does_not_cost_a_long_prefix() -> None:
    h = split()
    say(h, "long", "the " + LONG)
    say(h, "short", "the end")
    say(h, "again", "the " + LONG)
    assert cached(h, "again") == len("the " + LONG) - 1


def test_a_request_that_shares_half_of_a_prefix_leaves_the_rest_to_its_owner() -> None:
    h = split()
    say(h, "whole", LONG + OTHER)
    say(h, "half", LONG[:80] + "something else")
    assert cached(h, "half") == 80
    say(h, "again", LONG + OTHER)
    assert cached(h, "again") == len(LONG + OTHER) - 1


def test_sequences_that_compute_are_neighbours() -> None:
    """llama.cpp takes only neighbours into one micro-batch, and goes through the whole model for each."""
    h = split(6)
    for i in range(6):
        h.submit(f"r{i}", f"{i}: {LONG}", cache_prompt=True, max_tokens=40 if i in (0, 2, 5) else 5)
    h.tick(20)
    assert len(seq_ids(h)) == 3
    assert seq_ids(h) == list(range(seq_ids(h)[0], seq_ids(h)[0] + 3))
    h.run()
    for i in range(6):
        say(h, f"again {i}", f"{i}: {LONG}")
        assert cached(h, f"again {i}") == len(f"{i}: {LONG}") - 1, "a move cost a kept prefix"
    assert_as_alone(h, {f"r{i}": f"{i}: {LONG}" for i in (0, 2, 5)}, max_tokens=40)


def test_sequences_are_not_moved_where_that_takes_longer_than_the_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MOVE_PASSES", 0)
    h = split(3)
    for i in range(3):
        h.submit(f"r{i}", f"{i}: {LONG}", max_tokens=5 if i == 1 else 40)
    h.tick(20)
    assert seq_ids(h) == [0, 2]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_move_that_fails_costs_time_and_nothing_else(failures: int) -> None:
    h = split(3)
    for i in range(3):
        h.submit(f"r{i}", f"{i}: {LONG}", cache_prompt=True, max_tokens=5 if i == 1 else 40)
    h.tick(4)
    h.backend.failing_puts = failures
    h.run()
    assert h.backend.failing_puts == 0
    assert_as_alone(h, {"r0": f"0: {LONG}", "r2": f"2: {LONG}"}, max_tokens=40)


# --- a split cache that becomes one ---


def test_requests_within_their_shares_leave_the_cache_as_it_is() -> None:
    h = split(can_unify=True)
    for i in range(3):
        h.submit(f"r{i}", f"{i}: {LONG}", max_tokens=100)
    h.run()
    assert not h.backend.info.kv_unified


def test_a_request_may_outgrow_its_share_and_all_others_go_on() -> None:
    h = split(3, can_unify=True)
    h.submit("a", LONG, cache_prompt=True, max_tokens=300)
    h.submit("b", OTHER, max_tokens=30, params=HOT)
    h.submit("c", LONG + "again", cache_prompt=True, max_tokens=60)
    h.run()
    assert h.backend.info.kv_unified
    assert_as_alone(h, {"a": LONG}, max_tokens=300)
    assert_as_alone(h, {"b": OTHER}, max_tokens=30, params=HOT)
    assert_as_alone(h, {"c": LONG + "again"}, max_tokens=60)


def test_a_prompt_longer_than_a_share_is_served() -> None:
    h = split(can_unify=True)
    h.submit("running", OTHER, max_tokens=30)
    h.tick(5)
    h.submit("long", LONG * 3, max_tokens=10)
    h.run()
    assert_as_alone(h, {"running": OTHER}, max_tokens=30)
    assert_as_alone(h, {"long": LONG * 3}, max_tokens=10)


def test_what_is_more_than_all_shares_is_refused_with_both_numbers() -> None:
    h = split(can_unify=True)
    h.submit("long", LONG * 5, max_tokens=10)
    h.run()
    error = h.ended("long").error
    assert error is not None
    assert (str(len(LONG * 5) + 10) in error.message, "800" in error.message) == (True, True)
    assert not h.backend.info.kv_unified
