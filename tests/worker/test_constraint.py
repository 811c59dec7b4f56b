from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shared.errors import GrammarDeadEnd, UnsupportedSchema
from worker import matcher as matching
from worker.constraint import (
    AnyText,
    Blanks,
    Chain,
    Choice,
    Control,
    Literal,
    Many,
    Part,
    Until,
    after_reasoning,
    json_object_constraint,
    json_schema,
    json_schema_constraint,
    mark,
    render,
    text_or_tool_calls,
    tool_calls,
)
from worker.fake_scripts import BOS, EOS, IM_END, IM_START, N_TOKENS, SPOKEN, FakeVocab
from worker.matcher import ConstraintCompiler, Matcher

VOCAB = FakeVocab()
CITY = json_schema(
    {"properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}, ""
)
CALLS: list[Part] = [
    Chain((Literal(f'{{"name": "{name}", "arguments": '), json_schema({"type": "object"} | schema, "p"), Literal("}")))
    for name, schema in {"get": {"required": ["a"]}, "put": {}}.items()
]
GET, PUT = '{"name": "get", "arguments": {"a": 1}}', '{"name": "put", "arguments": {}}'


def spoken(*pieces: str | int) -> list[int]:
    """Tokens of an answer: of text, and control tokens."""
    return [t for p in pieces for t in ([p] if isinstance(p, int) else [SPOKEN + byte for byte in p.encode()])]


def follow(part: Part | str, tokens: Sequence[int]) -> Matcher | None:
    """The matcher behind the tokens; None if one of them is refused. Test and mask must agree on every one."""
    matcher = VOCAB.constraints.matcher(part if isinstance(part, str) else render(part))
    for token in tokens:
        allowed = matcher.mask()
        assert allowed[token] == matcher.allows(token)
        if not allowed[token]:
            return None
        matcher.accept(token)
    return matcher


def state(part: Part | str, *pieces: str | int) -> str:
    """What an answer is under the constraint: `refused`, `begun`, `accepted` (it may go on) or `complete`."""
    matcher = follow(part, spoken(*pieces))
    if matcher is None:
        return "refused"
    return "complete" if matcher.is_complete else "accepted" if matcher.is_accepting else "begun"


def test_an_object_is_complete_when_it_closes_and_nothing_may_follow() -> None:
    text = '{"a": [1, {"b": "}é😀"}]}'
    assert state(json_object_constraint(), text[:-1]) == "begun"
    assert state(json_object_constraint(), text) == "complete"
    for more in (" ", "\n", "{", EOS - SPOKEN):
        assert state(json_object_constraint(), text, str(more)) == "refused"
    matcher = follow(json_object_constraint(), spoken(text))
    assert matcher is not None
    assert set(np.flatnonzero(matcher.mask())) == VOCAB.eog
    matcher.accept(EOS)
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, "12", "accepted"),
        ({"type": "boolean"}, "true", "complete"),
        ({"type": "string"}, '"a"', "complete"),
        ({"type": "string"}, '"a', "begun"),
        ({"type": "array"}, "[]", "complete"),
        ({"enum": ["a", 10, 1]}, "1", "accepted"),
        ({"enum": ["a", 10, 1]}, "10", "complete"),
        ({"maximum": 5, "minimum": 0, "type": "integer"}, "3", "complete"),
    ],
)
def test_a_value_is_complete_when_it_cannot_go_on(schema: Any, text: str, expected: str) -> None:
    assert state(json_schema(schema, "p"), text) == expected


def test_an_answer_consists_of_spoken_tokens() -> None:
    matcher = follow(AnyText(), [])
    assert matcher is not None
    allowed = set(np.flatnonzero(matcher.mask()).tolist())
    assert not allowed & set(range(BOS))
    assert allowed & set(range(BOS, SPOKEN)) == {EOS, IM_END}
    assert not any(matcher.allows(token) for token in (*range(BOS + 1), IM_START))


def test_what_is_refused_changes_nothing() -> None:
    matcher = follow(json_object_constraint(), spoken("{"))
    assert matcher is not None
    for token in (SPOKEN + ord("x"), 65, EOS, IM_START, -1, N_TOKENS, 10**9):
        with pytest.raises(GrammarDeadEnd):
            matcher.accept(token)
    matcher.accept(SPOKEN + ord("}"))
    assert matcher.is_complete


def test_copies_go_their_own_ways() -> None:
    one, two = (VOCAB.constraints.matcher(json_object_constraint()) for _ in range(2))
    for token in spoken('{"a":'):
        one.accept(token)
    two.accept(SPOKEN + ord("{"))
    assert two.allows(SPOKEN + ord("}"))
    assert not one.allows(SPOKEN + ord("}"))


def test_a_literal_is_any_text() -> None:
    for text in ('a"b\\c', "x\ny\t", "<|im_end|>", "é😀", "/*#{}[]|()", "%json {}", "\\n"):
        assert state(Literal(text), text) == "complete"
        assert state(Literal(text), text[:-1]) == "begun"
    assert state(Chain((Literal(""), Literal("a"))), "a") == "complete"


def test_parts_are_put_together() -> None:
    part = Chain((Literal("a"), Many(Choice((Literal("b"), Literal("c")))), Blanks(), Control(IM_START)))
    assert state(part, "abccb \n", IM_START) == "complete"
    assert state(part, "a", IM_START) == "complete"
    assert state(part, "ad") == state(part, "a<|im_start|>") == state(part, IM_START) == "refused"


def test_a_mark_is_the_control_token_of_its_text_or_the_text() -> None:
    assert mark(VOCAB, "<|im_start|>") == Control(IM_START)
    assert mark(VOCAB, "<tool_call>") == Literal("<tool_call>")


def test_a_call_is_one_of_the_functions_with_its_arguments() -> None:
    part = Chain((Literal("<call>"), tool_calls(CALLS), Control(IM_START)))
    assert state(part, f"<call>{GET}", IM_START) == state(part, f"<call>{PUT}", IM_START) == "complete"
    assert state(part, '<call>{"name": "get", "arguments": {}}') == "refused"
    assert state(part, '<call>{"name": "other"') == "refused"
    assert state(part, GET) == "refused"


def test_calls_may_follow_each_other_where_there_is_something_between() -> None:
    part = tool_calls(CALLS, between=Literal("\n"))
    assert state(part, f"{GET}\n{PUT}\n{PUT}") == "accepted"
    assert state(part, "") == state(part, f"{GET}\n") == "begun"
    assert state(tool_calls(CALLS), f"{GET}\n") == "refused"


@pytest.mark.parametrize("opening", [Literal("<call>"), Control(IM_START)])
def test_free_text_may_hold_calls_which_follow_their_schema(opening: Literal | Control) -> None:
    part = text_or_tool_calls(opening, CALLS)
    sign = opening.text if isinstance(opening, Literal) else opening.token
    assert state(part, "") == state(part, "Hello <call") == state(part, GET) == "accepted"
    assert state(part, "Well: ", sign, GET, "\nand ", sign, PUT, " done") == "accepted"
    assert state(part, "Well: ", sign, '{"name": "get", "arguments": {}}') == "refused"
    assert state(part, sign, "x") == "refused"
    assert state(part, sign) == "begun"


@pytest.mark.parametrize("closing", [Literal("</think>"), Control(IM_START)])
def test_reasoning_is_free_and_the_rest_is_not(closing: Literal | Control) -> None:
    part = after_reasoning(closing, CITY)
    sign = closing.text if isinstance(closing, Literal) else closing.token
    assert state(part, 'so {"city": 1} </thin', sign, '\n\n{"city": "</think>"}') == "complete"
    assert state(part, sign, '{"city": ""}') == "complete"
    assert state(part, '{"city": "x"}') == "begun"
    assert state(part, "so", sign, '{"a"') == state(part, sign, "\n" * 9) == "refused"


def test_the_same_schema_is_written_once() -> None:
    assert render(tool_calls([CITY, CITY], between=CITY)).count("%json") == 1


def test_the_vocabulary_is_spelt_once_and_the_last_constraints_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MAX_COMPILED", 2)
    spelt = []
    compiler = ConstraintCompiler(lambda: spelt.append(1) or VOCAB._spelling())  # type: ignore[func-returns-value]
    texts = [json_schema_constraint({"const": value}, "p") for value in range(3)]
    first, second, _ = map(compiler.compile, texts)
    assert compiler.compile(texts[1]) is second
    assert compiler.compile(texts[0]) is not first
    assert spelt == [1]


def test_threads_may_compile_at_the_same_time() -> None:
    compiler = ConstraintCompiler(VOCAB._spelling)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(render(CITY)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("text", ["", "start: missing", "nonsense", 'start: %json {"type": "nope"}'])
def test_what_does_not_compile_is_refused_on_one_line(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedSchema, match="does not compile: .") as caught:
        VOCAB.check_constraint(text)
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_a_constraint_that_becomes_too_complex_fails_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Only a limit of llguidance stops this pattern: each character doubles what the lexer has to remember."""
    constraint = json_schema_constraint({"type": "string", "pattern": "^(a{0,900}){0,900}b$"}, "p")
    stuck, other = (VOCAB.constraints.matcher(text) for text in (constraint, json_object_constraint()))
    with pytest.raises(GrammarDeadEnd, match="too complex"):
        for token in spoken('"' + "a" * 3000):
            stuck.mask()
            stuck.accept(token)
    with pytest.raises(GrammarDeadEnd):
        stuck.allows(SPOKEN + ord("a"))
    assert not stuck.is_complete
    other.accept(SPOKEN + ord("{"))
    assert capfd.readouterr() == ("", "")


def test_a_schema_that_cannot_be_fulfilled_ends_in_a_dead_end() -> None:
    """2^53 is no multiple of 1.5, which shows only when the number is to begin."""
    schema = {"type": "array", "minItems": 1, "items": {"multipleOf": 1.5}, "allOf": [{"items": {"const": 2**53}}]}
    matcher = VOCAB.constraints.matcher(json_schema_constraint(schema, "p"))
    matcher.accept(SPOKEN + ord("["))
    with pytest.raises(GrammarDeadEnd, match="allows no token here"):
        matcher.mask()


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33])
def test_a_mask_has_one_place_for_each_token(size: int) -> None:
    vocab_size = N_TOKENS + size
    spelling = VOCAB._spelling()
    tokens = [*spelling.tokens, *(b"\xff<%d>" % i for i in range(size))]
    compiler = ConstraintCompiler(lambda: matching.Spelling(tokens, [*spelling.special_token_ids], spelling.eog))
    mask = compiler.matcher(render(Until(Literal("x")))).mask()
    assert mask.shape == (vocab_size,)
    first_bytes_of_utf8 = [*range(0x80), *range(0xC2, 0xF5)]
    assert np.flatnonzero(mask).tolist() == [SPOKEN + byte for byte in first_bytes_of_utf8]


def test_the_text_of_a_constraint_is_plain_json_within() -> None:
    text = json_schema_constraint({"title": "é\ud800", "const": "é"}, "p")
    assert "title" not in text
    assert json.dumps("é") in text
