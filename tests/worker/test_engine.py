from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadLogits, DecodeFailed, GenerationTimeout, GrammarDeadEnd, QueueTimeout
from shared.records import SlotTime
from tests.worker.engine_harness import Harness, alone
from worker import telemetry
from worker.backend import DecodeOutcome, SamplingParams
from worker.fake_backend import FakeBackend
from worker.requests import Ended, HandedBack, Paused, Progress, Started, Token

HOT = SamplingParams(temperature=0.8, seed=42)


def test_every_token_has_an_event_with_the_next_index() -> None:
    harness = alone("a", max_tokens=9)
    assert [t.index for t in harness.tokens("a")] == list(range(9))
    assert harness.ended("a").finish_reason == "length"
    assert harness.ended("a").stats.generated_tokens == 9


def test_texts_of_neighbours_equal_those_generated_alone() -> None:
    harness = Harness(FakeBackend("babble", n_parallel=8))
    params = {f"r{i}": HOT if i % 2 else SamplingParams() for i in range(24)}
    for i, (name, chosen) in enumerate(params.items()):
        harness.submit(name, params=chosen, max_tokens=5 + i)
    harness.run()
    for i, (name, chosen) in enumerate(params.items()):
        assert harness.text(name) == alone(name, params=chosen, max_tokens=5 + i).text(name)


@pytest.mark.parametrize("strategy", ["decode_maximal", "prefill_priority", "balanced", "adaptive"])
def test_the_strategy_changes_no_text(strategy: str) -> None:
    harness = Harness(FakeBackend("babble", n_batch=12), strategy, chunk_size=5)
    for i in range(9):
        harness.submit(f"r{i}", "x" * (3 * i + 1), params=HOT)
    harness.run()
    for i in range(9):
        assert harness.text(f"r{i}") == alone(f"r{i}", "x" * (3 * i + 1), params=HOT).text(f"r{i}")


def test_a_long_prompt_holds_a_generating_slot_up_by_one_chunk_at_most() -> None:
    harness = Harness(FakeBackend("babble", n_batch=4096), chunk_size=512)
    harness.submit("short", max_tokens=40)
    harness.tick(2)
    harness.submit("long", "y" * 2000)
    before = len(harness.backend.passes)
    while not harness.tokens("long"):
        count = len(harness.tokens("short"))
        harness.tick()
        assert len(harness.tokens("short")) == count + 1
    passes = list(harness.backend.passes)[before:]
    prefill = [sum(len(i.tokens) for i in items if len(i.tokens) > 1) for items in passes]
    assert max(prefill) <= 512
    assert sum(prefill) + sum(len(i.tokens) == 1 and i.seq_id == 1 for items in passes for i in items) >= 2000


def test_one_forward_pass_a_tick_carries_decode_and_prefill() -> None:
    harness = Harness()
    harness.submit("a", max_tokens=8)
    harness.tick()
    harness.submit("b", "a longer prompt")
    harness.tick()
    (items,) = list(harness.backend.passes)[1:]
    assert sorted(len(item.tokens) for item in items) == [1, len("a longer prompt")]


def test_a_stop_string_over_several_tokens_ends_the_request_and_stays_out() -> None:
    harness = Harness(FakeBackend("count"))
    harness.submit("a", stop=("5 6",), max_tokens=100)
    spoken = len("1 2 3 4 5 6")
    harness.tick(spoken - 1)
    assert len(harness.engine.pool.active) == 1
    harness.tick()  # the one that completes the stop string frees the slot
    assert not harness.engine.pool.active
    assert harness.text("a") == "1 2 3 4 "
    assert harness.ended("a").finish_reason == "stop"
    assert harness.ended("a").text == "1 2 3 4 "
    assert harness.ended("a").stats.generated_tokens == spoken


def test_text_held_back_to_the_end_comes_as_one_event_without_a_token() -> None:
    harness = Harness(FakeBackend("count"))
    harness.submit("a", stop=("4 X",), max_tokens=8)
    harness.run()
    *most, last = harness.tokens("a")
    assert harness.text("a") == "1 2 3 4 "
    assert last.token is None and last.text == "4 " and last.index == 8
    assert all(t.token is not None for t in most)
    assert harness.ended("a").tokens == 9 and harness.ended("a").stats.generated_tokens == 8


def test_a_character_of_four_tokens_comes_out_whole() -> None:
    harness = Harness(FakeBackend("echo"))
    harness.submit("a", "a😀b", max_tokens=50)
    harness.run()
    assert [t.text for t in harness.tokens("a")] == ["a", "", "", "", "😀", "b"]


def test_half_a_character_at_the_end_becomes_one_replacement_mark() -> None:
    harness = Harness(FakeBackend("echo"))
    harness.submit("a", "😀", max_tokens=3)
    harness.run()
    assert harness.text("a") == harness.ended("a").text == "\ufffd"


def test_the_end_token_is_neither_counted_nor_sent() -> None:
    harness = alone("a", "abc", script="echo", max_tokens=50)
    assert len(harness.tokens("a")) == harness.ended("a").stats.generated_tokens == 3
    assert harness.ended("a").finish_reason == "stop"


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    harness = alone("a", "abc", script="echo", max_tokens=7, params=SamplingParams(ignore_eos=True))
    assert harness.text("a") == "abcabca"
    assert harness.ended("a").finish_reason == "length"


def test_a_complete_grammar_ends_with_stop_even_under_ignore_eos() -> None:
    params = SamplingParams(grammar='root ::= "yes"', ignore_eos=True)
    harness = alone("a", params=params, max_tokens=50)
    assert harness.text("a") == "yes"
    assert harness.ended("a").finish_reason == "stop"


def test_a_dead_end_of_a_grammar_fails_that_request_alone() -> None:
    harness = Harness()
    harness.submit("bad", params=SamplingParams(grammar='root ::= "no" []'))
    harness.submit("good")
    harness.run()
    assert isinstance(harness.ended("bad").error, GrammarDeadEnd)
    assert harness.ended("bad").text == "no"
    assert harness.text("good") == alone("good").text("good")


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), HOT], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_fail_that_request_alone(value: float, params: SamplingParams) -> None:
    harness = Harness()
    for name in "abcd":
        harness.submit(name, params=params)
    harness.tick(3)
    harness.backend.poison[1] = value
    harness.run()
    errors = [name for name in "abcd" if harness.ended(name).error]
    assert len(errors) == 1 and isinstance(harness.ended(errors[0]).error, BadLogits)
    for name in set("abcd") - set(errors):
        assert harness.text(name) == alone(name, params=params).text(name)
    assert all(not tokens for tokens in harness.backend.cache)


@pytest.mark.parametrize("outcome", [DecodeOutcome.FAILED, DecodeOutcome.ABORTED])
def test_a_failed_pass_fails_only_what_took_part_in_it(outcome: DecodeOutcome) -> None:
    harness = Harness(FakeBackend("babble", n_parallel=2))
    for name in "abc":
        harness.submit(name)
    harness.tick(2)
    harness.backend.outcomes.append(outcome)
    harness.run()
    assert isinstance(harness.ended("a").error, DecodeFailed)
    assert isinstance(harness.ended("b").error, DecodeFailed)
    assert harness.text("c") == alone("c").text("c")


def test_requests_wait_until_their_reserve_fits() -> None:
    harness = Harness(FakeBackend("babble", n_ctx=1024, n_parallel=4))
    for i in range(4):
        harness.submit(f"r{i}", "z" * 300, max_tokens=400)
    most = 0
    while harness.engine.pool.active or harness.engine.waiting or not harness.events:
        harness.tick()
        most = max(most, len(harness.engine.pool.active))
        assert sum(map(len, harness.backend.cache)) <= 1024
    assert most == 1
    assert all(harness.ended(f"r{i}").stats.generated_tokens == 400 for i in range(4))


def test_no_room_evicts_what_is_kept_and_then_goes_on() -> None:
    harness = Harness(cache_all := FakeBackend("babble", n_parallel=2))
    harness.submit("kept", cache_prompt=True, max_tokens=4)
    harness.run()
    assert harness.engine.cache.tokens > 0
    harness.submit("next", "something else", max_tokens=4)
    cache_all.outcomes.append(DecodeOutcome.NO_ROOM)
    harness.run()
    assert harness.text("next") == alone("next", "something else", max_tokens=4).text("next")
    assert harness.engine.cache.tokens == 0


def test_no_room_pauses_the_youngest_which_goes_on_without_a_difference() -> None:
    harness = Harness()
    for name in "abc":
        harness.submit(name, params=HOT, max_tokens=20)
    harness.tick(5)
    harness.backend.outcomes.append(DecodeOutcome.NO_ROOM)
    harness.tick()
    assert len(harness.engine.pool.active) == 2
    harness.run()
    for name in "abc":
        assert harness.text(name) == alone(name, params=HOT, max_tokens=20).text(name)
        assert [t.index for t in harness.tokens(name)] == list(range(20))
    resumed = [e for e in harness.events if isinstance(e, Started) and e.resumed]
    assert [e.request.id for e in resumed] == ["c"]


def test_no_room_for_one_request_alone_fails_it() -> None:
    harness = Harness()
    harness.submit("a")
    harness.backend.outcomes.append(DecodeOutcome.NO_ROOM)
    harness.run()
    assert isinstance(harness.ended("a").error, DecodeFailed)


@pytest.mark.parametrize("params", [SamplingParams(), HOT, SamplingParams(temperature=1, presence_penalty=1.5, seed=3)])
def test_a_resumed_request_equals_the_uninterrupted_one_at_every_point(params: SamplingParams) -> None:
    whole = alone("a", params=params, max_tokens=12, stop=("qz",))
    tokens = [t.token for t in whole.tokens("a") if t.token is not None]
    for cut in range(len(tokens) + 1):
        harness = Harness()
        harness.submit("a", params=params, max_tokens=12, stop=("qz",), generated=tuple(tokens[:cut]))
        harness.run()
        assert [t.token for t in harness.tokens("a") if t.token is not None] == tokens[cut:]
        assert harness.ended("a").text == whole.ended("a").text
        assert harness.ended("a").finish_reason == whole.ended("a").finish_reason


def test_a_cancelled_request_leaves_its_slot_within_one_tick() -> None:
    harness = Harness()
    harness.submit("a", max_tokens=1000)
    harness.tick(4)
    harness.engine.cancel("execution-a")
    harness.tick()
    assert not harness.engine.pool.active
    assert harness.ended("a").finish_reason == "cancelled"
    assert harness.ended("a").stats.generated_tokens == 4


def test_a_cancel_between_prefill_chunks_costs_no_further_chunk() -> None:
    harness = Harness(FakeBackend("babble"), chunk_size=10)
    harness.submit("a", "w" * 100)
    harness.tick(2)
    harness.engine.cancel("execution-a")
    harness.run()
    assert len(harness.backend.passes) == 2
    assert harness.tokens("a") == []


def test_a_waiting_request_that_is_cancelled_computes_nothing() -> None:
    harness = Harness(FakeBackend("babble", n_parallel=1))
    harness.submit("busy")
    harness.submit("waiting")
    harness.tick()
    harness.engine.cancel("execution-waiting")
    harness.run()
    assert harness.ended("waiting").finish_reason == "cancelled"
    assert {i.seq_id for items in harness.backend.passes for i in items} == {0}
    assert harness.ended("waiting").stats.seq_id is None


def test_cancelling_what_is_not_here_changes_nothing() -> None:
    harness = Harness()
    harness.engine.cancel("execution-nobody")
    harness.tick()
    assert harness.events == []


def test_time_in_a_slot_is_limited_and_the_text_so_far_kept() -> None:
    harness = Harness()
    harness.submit("slow", max_tokens=1000, timeout_s=0.055)
    harness.submit("other", max_tokens=20)
    harness.run()
    end = harness.ended("slow")
    assert isinstance(end.error, GenerationTimeout) and end.finish_reason == "timeout"
    assert 0 < end.stats.generated_tokens < 10 and end.text == harness.text("slow")
    assert harness.text("other") == alone("other", max_tokens=20).text("other")


def test_time_in_slots_of_earlier_workers_counts() -> None:
    harness = Harness()
    harness.submit("slow", max_tokens=1000, timeout_s=1.055, used_s=1.0, has_started=True)
    harness.run()
    end = harness.ended("slow")
    assert end.finish_reason == "timeout" and 0 < end.stats.generated_tokens < 10
    assert end.stats.duration_s == pytest.approx(1.06)


def test_what_is_handed_back_takes_its_time_in_slots_with_it() -> None:
    harness = Harness(FakeBackend("babble", n_parallel=1))
    harness.submit("running", max_tokens=1000, used_s=2.0)
    harness.submit("waiting", used_s=3.0)
    harness.tick(5)
    assert harness.engine.slot_times["execution-running"].used_s == pytest.approx(2.04)
    harness.now += 1
    harness.engine.hand_back(running=True)
    harness.tick()
    times = {e.request.id: e.request.slot_time for e in harness.events if isinstance(e, HandedBack)}
    assert times["running"].used_s == pytest.approx(3.05) and times["running"].prompt_s == pytest.approx(2.0)
    assert times["waiting"] == SlotTime(3.0)
    harness.tick()
    assert harness.engine.slot_times == {}


def test_one_that_had_a_slot_before_its_first_token_starts_once_and_then_resumes() -> None:
    harness = Harness(chunk_size=10)
    harness.submit("a", "w" * 100)
    harness.submit("b")
    harness.tick(2)
    assert harness.tokens("a") == []
    harness.engine._pause(harness.engine.pool.active[0], harness.now)
    harness.run()
    assert [e.resumed for e in harness.events if isinstance(e, Started) and e.request.id == "a"] == [False, True]


def test_a_request_that_waited_too_long_is_never_started() -> None:
    harness = Harness(FakeBackend("babble", n_parallel=1))
    harness.submit("busy", max_tokens=50)
    harness.submit("late", start_by=0.1)
    harness.run()
    assert isinstance(harness.ended("late").error, QueueTimeout)
    assert not any(isinstance(e, Started) and e.request.id == "late" for e in harness.events)


def test_hand_back_gives_up_what_waits_and_on_demand_what_runs() -> None:
    harness = Harness(FakeBackend("babble", n_parallel=1))
    harness.submit("running", max_tokens=1000)
    harness.submit("waiting")
    harness.tick()
    harness.engine.hand_back(running=False)
    harness.tick()
    assert [e.request.id for e in harness.events if isinstance(e, HandedBack)] == ["waiting"]
    harness.engine.hand_back(running=True)
    harness.tick()
    assert [e.request.id for e in harness.events if isinstance(e, HandedBack)] == ["waiting", "running"]
    assert not any(isinstance(e, Ended) for e in harness.events)


def test_a_dropped_request_says_nothing_more() -> None:
    harness = Harness()
    harness.submit("a", max_tokens=1000)
    harness.tick(2)
    before = len(harness.events)
    harness.engine.drop("execution-a")
    harness.tick()
    assert len(harness.events) == before and not harness.engine.pool.active


def test_a_finished_prefix_is_computed_once() -> None:
    harness = Harness()
    prompt = "a common system prompt, "
    harness.submit("a", prompt + "first", cache_prompt=True)
    harness.run()
    harness.submit("b", prompt + "second", cache_prompt=True)
    harness.run()
    assert harness.ended("b").stats.cached_tokens == len(prompt)
    assert harness.text("b") == alone("b", prompt + "second").text("b")


def test_at_least_one_token_of_an_equal_prompt_is_computed() -> None:
    harness = Harness()
    for name in "ab":
        harness.submit(name, "the same", cache_prompt=True)
        harness.run()
    assert harness.ended("b").stats.cached_tokens == len("the same") - 1
    assert harness.text("b") == harness.text("a")


def test_a_request_can_turn_prefix_reuse_off() -> None:
    harness = Harness()
    harness.submit("a", "the same", cache_prompt=True)
    harness.run()
    harness.submit("b", "the same", cache_prompt=False)
    harness.run()
    assert harness.ended("b").stats.cached_tokens == 0


def test_a_model_that_cannot_be_cut_computes_the_whole_prompt() -> None:
    harness = Harness(FakeBackend("babble", cannot_cut=True))
    for name in "ab":
        harness.submit(name, "the same", cache_prompt=True)
        harness.run()
    assert harness.ended("b").stats.cached_tokens == 0
    assert harness.text("b") == harness.text("a")


def test_each_pass_is_signalled_with_its_figures() -> None:
    harness = Harness()
    ticks: list[telemetry.Tick] = []
    done: list[telemetry.RequestDone] = []

    def on_tick(_: object, tick: telemetry.Tick) -> None:
        ticks.append(tick)

    def on_done(_: object, done_: telemetry.RequestDone | None = None, **kw: telemetry.RequestDone) -> None:
        done.append(kw["done"])

    telemetry.tick.connect(on_tick, sender=harness.engine)
    telemetry.request_done.connect(on_done, sender=harness.engine)
    harness.engine.queue_depth = 3
    harness.submit("a", "four", max_tokens=3, stream=True)
    harness.run()
    assert [(t.batch_size, t.prefill_tokens, t.decode_tokens) for t in ticks] == [(4, 4, 0), (1, 0, 1), (1, 0, 1)]
    assert ticks[0].active_slots == 1 and ticks[0].queue_depth == 3
    (one,) = done
    assert (one.prompt_tokens, one.generated_tokens, one.mode, one.outcome) == (4, 3, "stream", "length")
    assert one.prefix_cache_ratio == 0 and one.seq_id == 0


def test_a_defect_in_a_tick_fails_its_requests_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    logits = harness.backend.logits
    broken = [True]

    def defect() -> object:
        if broken.pop() if broken else False:
            raise RuntimeError("a bug")
        return logits()

    monkeypatch.setattr(harness.backend, "logits", defect)
    over = threading.Event()

    def emit(events: list[object]) -> None:
        harness.events.extend(events)  # type: ignore[arg-type]
        if any(isinstance(e, Ended) and e.request.id == "b" for e in events):
            over.set()
        if any(isinstance(e, Ended) and e.request.id == "a" for e in events):
            harness.submit("b")

    harness.engine._emit = emit  # type: ignore[assignment]
    thread = threading.Thread(target=harness.engine.run)
    harness.submit("a")
    thread.start()
    assert over.wait(10)
    harness.engine.stop()
    thread.join()
    error = harness.ended("a").error
    assert error is not None and error.code == "internal_error" and error.retryable
    assert harness.text("b") == alone("b").text("b")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_work_loses_nothing_and_repeats_nothing(data: st.DataObject) -> None:
    draw = data.draw
    harness = Harness(FakeBackend("babble", n_ctx=160, n_parallel=3, n_batch=32), chunk_size=draw(st.integers(1, 20)))
    submitted: dict[str, dict[str, object]] = {}
    for step in range(draw(st.integers(1, 25))):
        action = draw(st.sampled_from(["submit", "submit", "cancel", "tick", "tick", "short"]))
        if action == "submit":
            options: dict[str, object] = {
                "prompt": draw(st.sampled_from(["shared prefix "] * 2 + [""])) + "p" * draw(st.integers(1, 30)),
                "max_tokens": draw(st.integers(1, 30)),
                "params": draw(st.sampled_from([SamplingParams(), HOT])),
                "cache_prompt": draw(st.booleans()),
            }
            submitted[f"r{step}"] = options
            harness.submit(f"r{step}", **options)  # type: ignore[arg-type]
        elif action == "cancel" and submitted:
            harness.engine.cancel("execution-" + draw(st.sampled_from(sorted(submitted))))
        elif action == "short" and len(harness.engine.pool.active) > 1:
            harness.backend.outcomes.append(DecodeOutcome.NO_ROOM)
        harness.tick(draw(st.integers(0, 4)))
    harness.run()
    ends = Counter(e.request.id for e in harness.events if isinstance(e, Ended))
    assert ends == Counter(list(submitted))
    for name, options in submitted.items():
        end = harness.ended(name)
        assert [t.index for t in harness.tokens(name)] == list(range(end.tokens))
        if end.finish_reason == "cancelled":
            expected = alone(name, **options).text(name)  # type: ignore[arg-type]
            assert expected.startswith(harness.text(name))
        elif end.error is None:
            assert harness.text(name) == alone(name, **options).text(name)  # type: ignore[arg-type]


def test_a_long_prompt_says_about_once_a_second_how_much_of_it_is_computed() -> None:
    harness = Harness(FakeBackend("babble", n_ctx=4096), chunk_size=64)
    request = harness.submit("long", "x" * 1000)
    while not harness.tokens("long"):
        harness.now += 0.4
        harness.tick()
    told = [e for e in harness.events if isinstance(e, Progress)]
    assert {e.request for e in told} == {request}
    assert [e.done for e in told] == sorted({e.done for e in told}) and 2 < len(told) < 10
    assert all(0 < e.done < e.total == 1000 for e in told)


def test_a_prompt_that_takes_less_than_a_second_says_nothing_of_it() -> None:
    harness = Harness(FakeBackend("babble", n_ctx=4096), chunk_size=64)
    harness.submit("long", "x" * 1000)
    harness.run()
    assert not [e for e in harness.events if isinstance(e, Progress)]


def test_what_loses_its_slot_says_so_with_the_tokens_it_has() -> None:
    harness = Harness(FakeBackend("babble", n_parallel=1))
    harness.submit("running", max_tokens=1000)
    harness.submit("waiting")
    harness.tick(5)
    made = len(harness.tokens("running"))
    harness.engine.hand_back(running=True)
    harness.tick()
    paused = [e for e in harness.events if isinstance(e, Paused)]
    assert [(e.request.id, e.tokens, e.reason) for e in paused] == [("running", made, "drained")]
    assert harness.events.index(paused[0]) < min(
        harness.events.index(e) for e in harness.events if isinstance(e, HandedBack)
    )


def test_the_average_time_in_a_slot_follows_the_requests_that_end() -> None:
    harness = Harness()
    assert harness.engine.job_s is None
    harness.submit("a", max_tokens=10)
    harness.run()
    first = harness.engine.job_s
    assert first is not None and first == pytest.approx(harness.ended("a").stats.duration_s)
    harness.submit("b", max_tokens=100)
    harness.run()
    assert first < harness.engine.job_s < harness.ended("b").stats.duration_s


def test_events_of_one_tick_leave_together_and_in_order() -> None:
    batches: list[list[object]] = []
    harness = Harness()
    harness.engine._emit = batches.append  # type: ignore[assignment]
    harness.submit("a", max_tokens=1)
    harness.submit("b", max_tokens=2)
    harness.tick()
    (first,) = batches
    kinds = [type(e) for e in first]
    assert kinds == [Started, Started, Token, Ended, Token]
