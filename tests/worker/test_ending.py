from __future__ import annotations

import pytest

from shared.errors import DecodeFailed, GrammarDeadEnd, InternalError
from tests.worker.engine_harness import Harness, alone, saying
from worker.answer import AnswerFormat, AnswerReader, CallDelta, Delta
from worker.backend import SamplingParams
from worker.ending import as_ours, ending
from worker.fake_backend import FakeBackend
from worker.fake_scripts import FakeVocab
from worker.requests import Request, Stats, Token
from worker.text import Transcript, transcript_of
from worker.tools import HERMES

FORMAT = AnswerFormat(("<think>", "</think>"), tools=HERMES, functions=frozenset({"weather"}), call_id="call_x_")
ANSWER = '<think>Where?</think>Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


def said(text: str, format: AnswerFormat | None = None, stops: tuple[str, ...] = ()) -> Transcript:
    return transcript_of(FakeVocab(), stops, format, tuple(text.encode()))


def stats(tokens: int) -> Stats:
    return Stats(3, tokens, 0, 0, 0, 0, 0, 0)


REQUEST = Request("r", "x", (1, 2, 3), SamplingParams(), 100)


def test_what_was_held_back_comes_before_the_end_and_is_part_of_its_text() -> None:
    tail, ended = ending(REQUEST, said("count 4 ", stops=("4 X",)), stats(8), "length")
    assert tail == Token(REQUEST, 8, None, "4 ")
    assert (ended.tokens, ended.text, ended.finish_reason) == (9, "count 4 ", "length")


def test_nothing_held_back_is_no_event() -> None:
    tail, ended = ending(REQUEST, said("all of it"), stats(9), "stop")
    assert tail is None
    assert (ended.tokens, ended.reasoning, ended.tool_calls, ended.logprobs) == (9, None, (), None)


def test_a_retry_is_left_what_was_held_back() -> None:
    tail, ended = ending(REQUEST, said("4 ", stops=("4 X",)), stats(2), None, DecodeFailed("a bad pass"))
    assert tail is None and ended.tokens == 2
    tail, _ = ending(REQUEST, said("4 ", stops=("4 X",)), stats(2), None, GrammarDeadEnd("no way on"))
    assert tail is not None and tail.text == "4 "


@pytest.mark.parametrize(("reason", "shown"), [("stop", "tool_calls"), ("length", "length")])
def test_an_answer_that_stops_with_calls_says_so(reason: str, shown: str) -> None:
    _, ended = ending(REQUEST, said(ANSWER, FORMAT), stats(len(ANSWER)), reason)  # type: ignore[arg-type]
    assert ended.finish_reason == shown
    assert (ended.text, ended.reasoning) == ("Let me see.", "Where?")
    (call,) = ended.tool_calls
    assert (call.name, call.arguments.replace(" ", "")) == ("weather", '{"city":"Ulm"}')


def test_half_a_mark_at_the_end_is_text() -> None:
    tail, ended = ending(REQUEST, said("see <tool_", FORMAT), stats(10), "length")
    assert tail is not None and tail.delta == Delta(" <tool_") and tail.text == " <tool_"
    assert ended.text == "see <tool_"


def test_a_defect_in_the_reader_at_the_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    transcript = said("hello", FORMAT)
    monkeypatch.setattr(AnswerReader, "finish", lambda self: 1 / 0)
    tail, ended = ending(REQUEST, transcript, stats(5), "stop")
    assert tail is None and isinstance(ended.error, InternalError) and ended.finish_reason is None
    assert "ZeroDivisionError" in ended.error.message


def test_errors_of_ours_stay_what_they_are() -> None:
    error = GrammarDeadEnd("no way on")
    assert as_ours(error) is error
    assert as_ours(KeyError("x")).code == "internal_error"


# --- the same through the engine ---


def parts(tokens: list[Token]) -> tuple[str, str, list[CallDelta]]:
    """All that token events add up to: text, reasoning, tool calls piece by piece."""
    deltas = [t.delta for t in tokens if t.delta is not None]
    assert [t.text for t in tokens] == [d.text for d in deltas]
    calls = [call for d in deltas for call in d.tool_calls]
    return "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls


def test_events_of_a_formatted_answer_carry_its_parts_and_no_marks() -> None:
    harness = alone("a", script=saying(ANSWER), format=FORMAT, max_tokens=200)
    tokens, ended = harness.tokens("a"), harness.ended("a")
    text, reasoning, calls = parts(tokens)
    assert (text, reasoning) == (ended.text, ended.reasoning) == ("Let me see.", "Where?")
    (call,) = ended.tool_calls
    assert (calls[0].id, calls[0].name) == (call.id, "weather")
    assert "".join(c.arguments for c in calls) == call.arguments
    assert [t.index for t in tokens] == list(range(ended.tokens))
    assert ended.finish_reason == "tool_calls" and ended.stats.generated_tokens == len(ANSWER)


def test_a_resumed_formatted_answer_gives_out_only_what_is_new() -> None:
    whole = alone("a", script=saying(ANSWER), format=FORMAT, max_tokens=200)
    events = whole.tokens("a")
    tokens = [t.token for t in events if t.token is not None]
    for cut in range(len(tokens) + 1):
        harness = Harness(FakeBackend(saying(ANSWER)))
        harness.submit("a", format=FORMAT, max_tokens=200, generated=tuple(tokens[:cut]))
        harness.run()
        assert parts([*events[:cut], *harness.tokens("a")]) == parts(events)
        assert harness.ended("a").tool_calls == whole.ended("a").tool_calls
        assert harness.ended("a").reasoning == whole.ended("a").reasoning
        assert harness.ended("a").finish_reason == "tool_calls"


def test_stop_strings_apply_to_what_the_model_writes() -> None:
    harness = alone("a", script=saying(ANSWER), format=FORMAT, max_tokens=200, stop=("</think>Let",))
    ended = harness.ended("a")
    assert (ended.reasoning, ended.text, ended.finish_reason) == ("Where?", "", "stop")


def test_a_request_without_a_format_says_its_marks() -> None:
    harness = alone("a", script=saying(ANSWER), max_tokens=200)
    assert harness.text("a") == harness.ended("a").text == ANSWER
    assert all(t.delta is None for t in harness.tokens("a"))


def test_a_defect_in_one_reader_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    push = AnswerReader.push

    def breaking(self: AnswerReader, text: str) -> Delta:
        if text == "m":
            raise RuntimeError("a bug")
        return push(self, text)

    monkeypatch.setattr(AnswerReader, "push", breaking)
    harness = Harness(FakeBackend(saying("Let me see.")))
    harness.submit("bad", format=FORMAT, max_tokens=50)
    harness.submit("good", max_tokens=50)
    harness.run()
    bad = harness.ended("bad")
    assert isinstance(bad.error, InternalError) and bad.text == "Let"
    assert [t.index for t in harness.tokens("bad")] == list(range(bad.tokens)) == [0, 1, 2, 3]
    assert harness.text("good") == "Let me see."


def test_a_defect_in_the_reader_of_a_resumed_request_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerReader, "push", lambda self, text: 1 / 0)
    harness = Harness(FakeBackend(saying("Let me see.")))
    harness.submit("bad", format=FORMAT, max_tokens=50, generated=tuple(saying("Let")([1] * n, 1) for n in (1, 2)))
    harness.submit("good", max_tokens=50)
    harness.run()
    assert isinstance(harness.ended("bad").error, InternalError)
    assert harness.text("good") == "Let me see."


def test_a_paused_answer_that_is_cancelled_keeps_text_and_reasoning_apart() -> None:
    harness = Harness(FakeBackend(saying("x"), n_parallel=1))
    harness.submit("busy", max_tokens=50)
    harness.submit("waiting", format=FORMAT, max_tokens=200, generated=tuple(260 + b for b in b"<think>a</think>bc"))
    harness.tick()
    harness.engine.cancel("execution-waiting")
    harness.run()
    ended = harness.ended("waiting")
    assert (ended.reasoning, ended.text, ended.finish_reason) == ("a", "bc", "cancelled")


def test_a_declined_request_never_gets_a_slot() -> None:
    harness = Harness()
    harness.engine.decline(Request("gone", "execution-gone", (1, 2, 3), SamplingParams(), 10))
    harness.tick()
    assert harness.ended("gone").finish_reason == "cancelled" and harness.ended("gone").stats.seq_id is None
    assert not harness.backend.passes


# --- the end of a grammar ---


def test_an_answer_ends_with_the_token_that_completes_its_grammar() -> None:
    harness = alone("a", params=SamplingParams(grammar='root ::= "yes"'), max_tokens=50)
    assert harness.text("a") == "yes" and harness.ended("a").finish_reason == "stop"
    assert len(harness.backend.passes) == 3


def test_a_complete_answer_that_was_interrupted_computes_nothing() -> None:
    done = tuple(260 + byte for byte in b"yes")
    harness = alone("a", params=SamplingParams(grammar='root ::= "yes"'), max_tokens=50, generated=done)
    assert harness.ended("a").text == "yes" and harness.ended("a").finish_reason == "stop"
    assert not harness.backend.passes
