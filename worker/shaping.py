"""What form an answer has to have: the constraint that follows from `response_format`, tools and reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shared.errors import UnsupportedField, UnsupportedSchema
from shared.schemas import Function, GenerationRequest, NamedTool
from worker.answer import AnswerFormat
from worker.backend import Vocabulary
from worker.chat import Thinking
from worker.constraint import (
    AnyText,
    Blanks,
    Chain,
    Choice,
    Control,
    Literal,
    Part,
    Until,
    after_reasoning,
    json_schema,
    mark,
    render,
    text_or_tool_calls,
    tool_calls,
)
from worker.tools import ToolSyntax

_ANY_OBJECT = {"type": "object"}


def constraint_of(
    body: GenerationRequest, vocab: Vocabulary, format: AnswerFormat | None, thinking: Thinking
) -> str | None:
    """The constraint of an answer to the request; None where it is free.

    Args:
        format: how the model writes reasoning and tool calls; None where it does neither.
        thinking: what the prompt has written of the model's reasoning.

    Raises:
        UnsupportedSchema: a schema cannot be enforced.
        UnsupportedField: `strict`, or a form beside tools, where the model's calls have no mark to know them by.
    """
    part = _answer(body, vocab, format.tools if format else None)
    if part is None:
        return None
    if format is not None and format.reasoning is not None and thinking != "closed":
        part = _reasoned(part, vocab, format.reasoning, thinking)
    return render(part)


def _reasoned(part: Part, vocab: Vocabulary, marks: tuple[str, str], thinking: Thinking) -> Part:
    opening, closing = (mark(vocab, text) for text in marks)
    if thinking == "open":
        return after_reasoning(closing, part)
    # One part behind both ways, so that its schema is compiled once.
    return Chain((Choice((Chain((opening, Until(closing), Blanks())), Literal(""))), part))


def _answer(body: GenerationRequest, vocab: Vocabulary, syntax: ToolSyntax | None) -> Part | None:
    schema = body.schema_of_answer
    wanted = None if schema is None else json_schema(schema, _schema_path(body))
    if syntax is None:
        return wanted
    calls = _Calls(body, vocab, syntax)
    if body.tool_choice not in (None, "auto"):
        return calls.required()
    if wanted is not None and syntax.form == "bare":
        message = "this model's tool calls cannot be told from JSON; give `response_format` or `tools`, not both"
        raise UnsupportedField(message, "response_format")
    if wanted is not None:
        return Choice((calls.required(), wanted))
    return calls.optional()


def _schema_path(body: GenerationRequest) -> str:
    given = body.response_format
    return "response_format.json_schema.schema" if given and given.json_schema else "response_format.schema"


class _Calls:
    """The calls of a request's tools, as parts of a constraint."""

    def __init__(self, body: GenerationRequest, vocab: Vocabulary, syntax: ToolSyntax) -> None:
        chosen = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        tools = enumerate(body.tools or ())
        self._functions = [(i, t.function) for i, t in tools if chosen in (None, t.function.name)]
        self._syntax = syntax
        self._vocab = vocab
        self._begin, self._end = mark(vocab, syntax.begin), self._marks(syntax.end)
        self._all = body.tool_choice not in (None, "auto")
        self._one = chosen is not None or body.parallel_tool_calls is False or not syntax.many
        self._at_most_one = body.parallel_tool_calls is False and syntax.many

    def required(self) -> Part:
        """At least one call and nothing else."""
        form = self._syntax.form
        if form == "bare":
            return tool_calls(self._bodies())
        if form == "list":
            return Chain((self._begin, self._run()))
        calls = [Chain((self._begin, call)) for call in self._bodies()]
        return tool_calls(calls, between=None if self._one else Literal("\n" if form == "marked" else ""))

    def optional(self) -> Part | None:
        """Text with calls in it; None where nothing of it has to be enforced."""
        strict = next((i for i, function in self._functions if function.strict), None)
        if strict is None and not self._at_most_one:
            return None
        if self._syntax.form == "bare":
            message = "this model's tool calls cannot be told from text before they are made; use `tool_choice`"
            raise UnsupportedField(message, f"tools.{strict}.function.strict")
        calls = [self._run()] if self._syntax.form == "list" else self._bodies()
        if self._at_most_one:
            return Choice((Chain((Until(self._begin), Choice(tuple(calls)))), AnyText()))
        return text_or_tool_calls(self._begin, calls)

    def _run(self) -> Part:
        items = tool_calls(self._bodies(), between=None if self._one else Literal(", "))
        return Chain((Literal("["), items, Literal("]"), *self._end))

    def _bodies(self) -> Sequence[Part]:
        """Each function's call, without the mark it begins with."""
        return [self._body(function, self._arguments(i, function)) for i, function in self._functions]

    def _body(self, function: Function, arguments: Part) -> Part:
        syntax = self._syntax
        if syntax.form == "named":
            return Chain((Literal(function.name), *self._marks(syntax.separator), arguments))
        opened = f'{{"name": {json.dumps(function.name)}, "{syntax.arguments}": '
        if syntax.form == "marked":
            return Chain((Literal("\n" + opened), arguments, Literal("}\n"), *self._end))
        return Chain((Literal(opened), arguments, Literal("}")))

    def _arguments(self, place: int, function: Function) -> Part:
        param = f"tools.{place}.function.parameters"
        if not (self._all or function.strict):
            return json_schema(_ANY_OBJECT, param)
        schema: dict[str, Any] = {"type": "object", **(function.parameters or {"additionalProperties": False})}
        if schema["type"] != "object":
            raise UnsupportedSchema("the arguments of a function are an object", f"{param}.type")
        return json_schema(schema, param)

    def _marks(self, text: str) -> tuple[Literal | Control, ...]:
        return (mark(self._vocab, text),) if text else ()
