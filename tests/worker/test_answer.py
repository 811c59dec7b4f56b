from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import tool_calls
from worker.answer import AnswerFormat, AnswerReader, Delta, ToolCall, marks_of
from worker.fake_scripts import SPOKEN, FakeVocab
from worker.tools import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, SYNTAXES, ToolSyntax

THINK = ("<think>", "</think>")
ARGS = '{"city": "Os\\"lo}", "days": [1, {"a": 2}]}'
CALL = f'{{"name": "weather", "arguments": {ARGS}}}'
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"


def reader(tools: ToolSyntax | None = None, think: bool = True, opened: bool = False) -> AnswerReader:
    format = AnswerFormat(
        reasoning=THINK if think else None,
        reasoning_open=opened,
        tools=tools,
        functions=frozenset({"weather", "news"}),
        call_id="call",
    )
    return AnswerReader(format)


def read(text: str, made: AnswerReader, sizes: tuple[int, ...] = ()) -> AnswerReader:
    """Push the text in pieces and check that what was given out is what the reader says in the end."""
    deltas: list[Delta] = []
    for size in sizes:
        deltas.append(made.push(text[:size]))
        text = text[size:]
    deltas += [made.push(text), made.finish()]
    assert "".join(d.text for d in deltas) == made.text
    assert "".join(d.reasoning for d in deltas) == made.reasoning
    calls: dict[int, ToolCall] = {}
    for piece in (p for d in deltas for p in d.tool_calls):
        if piece.name is not None:
            assert piece.id is not None and piece.index == len(calls)
            calls[piece.index] = ToolCall(piece.id, piece.name)
        calls[piece.index].arguments += piece.arguments
    assert list(calls.values()) == made.tool_calls
    return made


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("<think>hm</think>yes", True, "hm", "yes"),
        ("\n<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("  yes", False, "", "  yes"),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("never ends </thin", True, "never ends </thin", ""),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, opened: bool, reasoning: str, answer: str) -> None:
    made = read(text, reader(opened=opened))
    assert (made.reasoning, made.text) == (reasoning, answer)


def test_reasoning_is_text_where_the_model_does_not_reason() -> None:
    assert read("<think>hm</think>yes", reader(think=False)).text == "<think>hm</think>yes"


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, HERMES_CALL),
        (HERMES, f"\n<tool_call>{CALL}</tool_call>\n"),
        (LLAMA3, CALL.replace("arguments", "parameters")),
        (LLAMA3, f"<|python_tag|>{CALL.replace('arguments', 'parameters')}"),
        (LLAMA3, f'{{"type": "function", "name": "weather", "parameters": {json.dumps(json.loads(ARGS))}}}'),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]"),
        (MISTRAL, f'[TOOL_CALLS] [{CALL[:-1]}, "id": "abcdefghi"}}]'),
        (MISTRAL_NAMED, f"[TOOL_CALLS]weather[ARGS]{ARGS}"),
        (MISTRAL_NAMED, f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS] {ARGS}"),
    ],
)
def test_a_call_is_read_in_each_syntax(syntax: ToolSyntax, text: str) -> None:
    made = read(text, reader(syntax))
    assert (made.text, made.tool_calls) == ("", [ToolCall("call_0", "weather", ARGS)])


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, f"I look.\n{HERMES_CALL}\n{HERMES_CALL}"),
        (MISTRAL, f"I look.[TOOL_CALLS][{CALL}, {CALL}]"),
        (MISTRAL_NAMED, f"I look.[TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]weather[ARGS]{ARGS}"),
    ],
)
def test_several_calls_after_text_are_read(syntax: ToolSyntax, text: str) -> None:
    made = read(text, reader(syntax))
    assert made.text == "I look."
    assert made.tool_calls == [ToolCall("call_0", "weather", ARGS), ToolCall("call_1", "weather", ARGS)]


def test_reasoning_text_and_calls_come_apart_in_one_answer() -> None:
    made = read(f"<think>\nhm\n</think>\n\nSo: \n{HERMES_CALL}\nDone.", reader(HERMES))
    assert (made.reasoning, made.text, len(made.tool_calls)) == ("hm", "So:Done.", 1)


def test_the_name_comes_first_and_whole_and_the_arguments_bit_by_bit() -> None:
    made = reader(HERMES)
    deltas = [made.push(character) for character in HERMES_CALL]
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert (pieces[0].id, pieces[0].name, pieces[0].arguments) == ("call_0", "weather", "")
    assert [piece.arguments for piece in pieces[1:]] == list(ARGS)
    assert all(piece.name is None and piece.id is None for piece in pieces[1:])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a <tool_call> b",
        "<tool_call>\n[1]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": 1}',
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "x" * 65 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"a": ' + "[" * 3000 + "</tool_call>",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call",
    ],
)
def test_what_looks_like_a_call_and_is_none_is_text(text: str) -> None:
    made = read(text, reader(HERMES))
    if made.tool_calls:
        assert made.tool_calls == [ToolCall("call_0", "weather", '{"a": 1}')], "a call that was cut off"
    else:
        assert made.text == text


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "unknown", "parameters": {}}',
        '{"answer": 42}',
        "{",
        "<|python_tag|>print(1)",
        'Text first {"name": "weather", "parameters": {}}',
    ],
)
def test_without_a_mark_only_a_known_name_makes_a_call(text: str) -> None:
    made = read(text, reader(LLAMA3))
    assert (made.text, made.tool_calls) == (text, [])


def test_an_object_that_can_be_no_call_is_given_out_at_once() -> None:
    made = reader(LLAMA3, think=False)
    assert made.push('{"answer": ').text == '{"answer": '


def test_text_is_not_held_back_longer_than_needed() -> None:
    made = reader(HERMES, think=False)
    assert [made.push(piece).text for piece in ("a b", " c <too", "thbrush> d")] == ["a b", " c", " <toothbrush> d"]


@pytest.mark.parametrize(
    ("keys", "arguments"), [('"arguments": {"a": 1}, "name": "news"', '{"a": 1}'), ('"name": "news"', "{}")]
)
def test_a_call_in_another_shape_is_read_when_it_is_complete(keys: str, arguments: str) -> None:
    made = read(f"<tool_call>{{{keys}}}</tool_call>", reader(HERMES))
    assert made.tool_calls == [ToolCall("call_0", "news", arguments)]


@pytest.mark.parametrize("sizes", [(), (1,) * 200])
def test_calls_in_another_shape_follow_each_other_in_a_list(sizes: tuple[int, ...]) -> None:
    turned = '{"arguments": {"a": [1]}, "name": "news"}'
    made = read(f"[TOOL_CALLS][{CALL}, {turned}, {turned}]", reader(MISTRAL), sizes)
    assert [call.name for call in made.tool_calls] == ["weather", "news", "news"] and made.text == ""


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": [-Infinity]}', '{"a": ' + "9" * 5000 + "}"])
def test_numbers_that_json_cannot_hold_make_no_call_in_another_shape(arguments: str) -> None:
    text = f'<tool_call>{{"arguments": {arguments}, "name": "weather"}}</tool_call>'
    made = read(text, reader(HERMES, think=False))
    assert made.tool_calls == [] and made.text == text


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda s: s.name)
@pytest.mark.parametrize("endless", ['{"name": "' + "a" * 5000, '{"' + "a" * 5000, "{" + " " * 5000, " " * 5000])
def test_what_never_becomes_a_call_is_not_searched_from_the_start_for_each_token(
    form: ToolSyntax, endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = [0]

    def match(pattern: str, text: str, flags: int = 0) -> re.Match[str] | None:
        longest.append(len(text))
        return re.match(pattern, text, flags)

    monkeypatch.setattr(tool_calls, "re", SimpleNamespace(match=match, escape=re.escape, DOTALL=re.DOTALL))
    made = read(form.begin + endless, reader(form, think=False), (3,) * 1600)
    assert made.text == form.begin + endless and made.tool_calls == []
    assert max(longest) <= 256


def test_a_call_behind_many_blanks_in_its_object_is_read_when_it_is_complete() -> None:
    text = "<tool_call>{" + " " * 400 + '"name": "weather", "arguments": {}}</tool_call>'
    assert [c.name for c in read(text, reader(HERMES), (5,) * 60).tool_calls] == ["weather"]


def test_arguments_that_are_json_text_are_unpacked() -> None:
    text = '<tool_call>{"name": "news", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(text, reader(HERMES)).tool_calls == [ToolCall("call_0", "news", '{"a": 1}')]


def test_a_call_cut_off_at_the_limit_keeps_what_there_is() -> None:
    made = read('<tool_call>\n{"name": "weather", "arguments": {"city": "Os', reader(HERMES))
    assert (made.text, made.tool_calls) == ("", [ToolCall("call_0", "weather", '{"city": "Os')])


def test_rubbish_behind_a_call_of_a_list_is_text() -> None:
    made = read(f"[TOOL_CALLS][{CALL}, nothing", reader(MISTRAL))
    assert (made.text, len(made.tool_calls)) == (", nothing", 1)


PIECES = st.sampled_from(
    [
        *THINK,
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[",
        "]",
        ", ",
        "weather[ARGS]",
        ARGS,
        CALL,
        "\n",
        " ",
        "{",
        "}",
    ]
    + [
        '{"arguments": {}, "name": "news"}',
        '"name": "weather"',
        "<|python_tag|>",
        CALL.replace("arguments", "parameters"),
        "a",
        "<",
        "é",
        '"',
    ]
)


@given(
    text=st.lists(PIECES, max_size=12).map("".join),
    syntax=st.sampled_from([None, *SYNTAXES]),
    opened=st.booleans(),
    sizes=st.lists(st.integers(1, 40), max_size=60).map(tuple),
)
def test_how_an_answer_is_cut_into_pieces_changes_nothing(
    text: str, syntax: ToolSyntax | None, opened: bool, sizes: tuple[int, ...]
) -> None:
    whole = read(text, reader(syntax, opened=opened))
    cut = read(text, reader(syntax, opened=opened), sizes)
    assert (cut.text, cut.reasoning, cut.tool_calls) == (whole.text, whole.reasoning, whole.tool_calls)


@given(text=st.lists(PIECES, max_size=12).map("".join), syntax=st.sampled_from([None, *SYNTAXES]), opened=st.booleans())
def test_no_letter_of_an_answer_is_lost(text: str, syntax: ToolSyntax | None, opened: bool) -> None:
    made = read(text, reader(syntax, opened=opened))
    given_out = made.reasoning + made.text + "".join(call.name + call.arguments for call in made.tool_calls)
    assert given_out.count("é") == text.count("é")
    assert given_out.count("a") <= text.count("a")


def test_marks_that_are_control_tokens_are_spelt_out() -> None:
    vocab = FakeVocab()
    marks = marks_of(vocab, ("<|im_start|>", "<think>"))
    format = AnswerFormat(marks=marks)
    (control,) = vocab.tokenize("<|im_start|>", parse_special=True)
    assert marks == {control: b"<|im_start|>"}
    assert vocab.piece(control) == b"" and format.piece(control, vocab) == b"<|im_start|>"
    assert format.piece(SPOKEN + ord("x"), vocab) == b"x"
