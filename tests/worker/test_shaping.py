from __future__ import annotations

from typing import Any

import pytest

from shared.errors import UnsupportedField, UnsupportedSchema
from shared.schemas import GenerationRequest
from worker.answer import AnswerFormat
from worker.chat import Thinking
from worker.fake_scripts import SPOKEN, FakeVocab
from worker.shaping import constraint_of
from worker.tools import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, SYNTAXES, ToolSyntax

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "weather"}}
THINK = ("<think>", "</think>")


def written(syntax: ToolSyntax, *keys: str) -> str:
    """Calls of the function `weather`, one for each key of its arguments."""
    if syntax is MISTRAL_NAMED:
        return "".join(f'[TOOL_CALLS]weather[ARGS]{{"{key}": "Oslo"}}' for key in keys)
    calls = [f'{{"name": "weather", "{syntax.arguments}": {{"{key}": "Oslo"}}}}' for key in keys]
    if syntax is HERMES:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return f"[TOOL_CALLS][{', '.join(calls)}]" if syntax is MISTRAL else calls[0]


def constraint(
    syntax: ToolSyntax | None,
    reasoning: tuple[str, str] | None = None,
    thinking: Thinking = "free",
    strict: bool | None = None,
    **fields: Any,
) -> str | None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **fields}
    if syntax is not None:
        weather = {"name": "weather", "parameters": CITY, "strict": strict}
        functions = [weather, {"name": "news"}]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    format = AnswerFormat(reasoning=reasoning, tools=syntax)
    return constraint_of(GenerationRequest.model_validate(body), FakeVocab(), format, thinking)


def fits(made: str | None, text: str) -> bool:
    """Whether an answer may be exactly this text."""
    assert made is not None
    matcher = FakeVocab().constraints.matcher(made)
    for byte in text.encode():
        if matcher.is_complete or not matcher.allows(SPOKEN + byte):
            return False
        matcher.accept(SPOKEN + byte)
    return matcher.is_accepting


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: s.name)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_has_the_models_syntax_and_the_functions_arguments(syntax: ToolSyntax, choice: Any) -> None:
    made = constraint(syntax, tool_choice=choice)
    assert fits(made, written(syntax, "city"))
    assert not fits(made, written(syntax, "town"))
    assert not any(fits(made, text) for text in ("", "hi", "{}"))


@pytest.mark.parametrize("syntax", [HERMES, MISTRAL, MISTRAL_NAMED], ids=lambda s: s.name)
def test_several_calls_are_made_unless_one_is_asked_for(syntax: ToolSyntax) -> None:
    two = written(syntax, "city", "city")
    assert fits(constraint(syntax, tool_choice="required"), two)
    assert not fits(constraint(syntax, tool_choice="required", parallel_tool_calls=False), two)
    assert not fits(constraint(syntax, tool_choice=NAMED), two)
    assert not fits(constraint(syntax, parallel_tool_calls=False), two)


def test_a_named_function_is_the_only_one_that_may_be_called() -> None:
    news = '<tool_call>\n{"name": "news", "arguments": {}}\n</tool_call>'
    assert fits(constraint(HERMES, tool_choice="required"), news)
    assert not fits(constraint(HERMES, tool_choice=NAMED), news)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda s: s.name)
def test_an_answer_with_tools_is_free_by_default(syntax: ToolSyntax) -> None:
    assert constraint(syntax) is None and constraint(syntax, tool_choice="auto") is None


@pytest.mark.parametrize("syntax", [HERMES, MISTRAL, MISTRAL_NAMED], ids=lambda s: s.name)
def test_strict_arguments_are_kept_to_wherever_a_call_begins(syntax: ToolSyntax) -> None:
    made = constraint(syntax, strict=True)
    assert fits(made, "hi " + written(syntax, "city"))
    assert not fits(made, "hi " + written(syntax, "town"))
    assert fits(made, "no call")


def test_strict_is_refused_where_a_call_has_no_mark() -> None:
    with pytest.raises(UnsupportedField) as caught:
        constraint(LLAMA3, strict=True)
    assert caught.value.param == "tools.0.function.strict"


def test_a_schema_beside_tools_is_refused_where_a_call_has_no_mark() -> None:
    with pytest.raises(UnsupportedField) as caught:
        constraint(LLAMA3, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"


def test_one_call_at_most_leaves_arguments_that_are_not_strict_free() -> None:
    assert fits(constraint(HERMES, parallel_tool_calls=False), "hi " + written(HERMES, "town"))
    assert fits(constraint(HERMES, parallel_tool_calls=False), "hi")


@pytest.mark.parametrize("syntax", [HERMES, MISTRAL, MISTRAL_NAMED], ids=lambda s: s.name)
def test_with_a_schema_an_answer_is_a_call_or_fulfils_it(syntax: ToolSyntax) -> None:
    made = constraint(syntax, response_format={"type": "json_schema", "json_schema": {"schema": CITY}})
    assert fits(made, '{"city": "Oslo"}') and fits(made, written(syntax, "city"))
    assert not fits(made, '{"town": "Oslo"}') and not fits(made, "hi")


def test_a_schema_without_tools_is_the_whole_answer() -> None:
    made = constraint(None, response_format={"type": "json_object"})
    assert fits(made, '{"a": [1]}') and not fits(made, "[1]") and not fits(made, 'x {"a": 1}')


@pytest.mark.parametrize(
    ("thinking", "answer", "right"),
    [
        ("open", 'hm {</think>\n\n{"a": 1}', True),
        ("open", '{"a": 1}', False),
        ("free", '<think>hm</think>\n{"a": 1}', True),
        ("free", '{"a": 1}', True),
        ("free", 'hm</think>{"a": 1}', False),
        ("closed", '{"a": 1}', True),
        ("closed", '<think>hm</think>{"a": 1}', False),
    ],
)
def test_reasoning_comes_before_what_is_constrained(thinking: Thinking, answer: str, right: bool) -> None:
    made = constraint(None, THINK, thinking, response_format={"type": "json_object"})
    assert fits(made, answer) is right


def test_reasoning_comes_before_a_required_call() -> None:
    made = constraint(HERMES, THINK, "open", tool_choice="required")
    assert fits(made, "hm\n</think>\n\n" + written(HERMES, "city"))
    assert not fits(made, "hm\n</think>\n\nhi")


def test_strict_holds_behind_reasoning_too() -> None:
    made = constraint(HERMES, THINK, "free", strict=True)
    assert fits(made, "<think>hm</think>\n" + written(HERMES, "city"))
    assert not fits(made, "<think>hm</think>\n" + written(HERMES, "town"))


def test_marks_that_are_control_tokens_are_written_as_these() -> None:
    syntax = ToolSyntax("own", "marked", "<|im_start|>", "<|eos|>")
    made = constraint(syntax, tool_choice=NAMED)
    vocab = FakeVocab()
    assert made is not None and not fits(made, "<|im_start|>")
    (begin,) = vocab.tokenize("<|im_start|>", parse_special=True)
    assert vocab.constraints.matcher(made).allows(begin)


def test_arguments_of_a_function_are_an_object() -> None:
    function = {"name": "f", "parameters": {"type": "array"}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    with pytest.raises(UnsupportedSchema) as caught:
        constraint_of(GenerationRequest.model_validate(body), FakeVocab(), AnswerFormat(tools=HERMES), "free")
    assert caught.value.param == "tools.0.function.parameters.type"
