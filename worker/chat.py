"""Chat messages to prompt tokens, by the model's own Jinja template or the worker's file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError, meta

from shared.errors import ChatTemplateError, UnsupportedCapability, UnsupportedField
from worker.backend import Vocabulary
from worker.history import History, find_history
from worker.jinja_env import make_environment
from worker.plain_text import PlainText, Variables
from worker.tools import ToolSyntax

#: What a template itself may do wrong with messages it was not written for.
_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)

#: Rendering ends here: a template may repeat what it is given, but not without end.
MAX_PROMPT_CHARS = 8 * 1024 * 1024
MAX_RENDER_S = 5.0

#: The marks that models write around their reasoning. Source: their published templates.
REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)

#: Roles of the OpenAI API; a template may name others.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

Thinking = Literal["free", "open", "closed"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat. `thinking` says whether it has opened the model's reasoning, or opened and closed it."""

    tokens: list[int]
    thinking: Thinking


class ChatTemplate:
    """A compiled chat template. Its methods may be called from any thread.

    Attributes:
        variables: what the template reads of what it is given.
        reasoning: the marks around the model's reasoning; None where the template knows of none.
        reads_tools: whether the template takes tools at all.
        tool_syntax: how the model writes tool calls; None where it does not, or in no way we can read.
    """

    def __init__(self, source: str, vocab: Vocabulary) -> None:
        """Compile the template and find out what it can do.

        Raises:
            ChatTemplateError: it does not parse.
        """
        environment = make_environment()
        try:
            self._template = environment.from_string(source)
            read = meta.find_undeclared_variables(environment.parse(source))
        except _FAULTS as error:
            raise ChatTemplateError(f"the chat template does not parse: {error}") from None
        self._plain = PlainText(vocab)
        self._controls = vocab.control_texts()
        self._source = source
        self._ours = {
            "add_generation_prompt": True,
            "bos_token": vocab.token_text(vocab.bos) if vocab.bos is not None else "",
            "eos_token": vocab.token_text(vocab.eos) if vocab.eos is not None else "",
        }
        self._reserved = {"messages", "tools", *self._ours, *environment.globals}
        self.variables = frozenset(read - set(environment.globals))
        self.reasoning = next((marks for marks in REASONING_MARKS if marks[1] in source), None)
        self.reads_tools = "tools" in self.variables
        self._history: History = find_history(self._probe) if "tool_calls" in source else History()
        self.tool_syntax: ToolSyntax | None = self._history.syntax if self.reads_tools else None

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Of `chat`, `tools` and `thinking`."""
        tools = ("tools",) if self.tool_syntax else ()
        return ("chat", *tools, *(("thinking",) if self.reasoning else ()))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, ready for the model to answer.

        Args:
            messages: as in OpenAI's API, contents as text and arguments of calls as JSON text.
            tools: as in OpenAI's API.
            options: further variables of the template.

        Raises:
            ChatTemplateError: the template refused the messages; carries its message.
            UnsupportedCapability: it does not read the tools or tool calls.
            UnsupportedField: it does not read an option.
        """
        return self._render(self._variables(messages, tools, options))

    def prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt as tokens. Control tokens come from the template alone, never from what users give.

        Raises:
            ChatTemplateError: as in `render`; or the template changes text that spells a control token, so that it
                cannot be told apart from its own.
            UnsupportedCapability: as in `render`.
            UnsupportedField: as in `render`.
        """
        variables = self._variables(messages, tools, options)
        try:
            text, tokens = self._plain.render(variables, self._render)
        except RecursionError:
            raise ChatTemplateError("the request is nested too deeply", "messages") from None
        return ChatPrompt(tokens, self._thinking(text))

    def tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The prompt of messages alone as tokens; see `prompt`."""
        return self.prompt(messages).tokens

    def _variables(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> Variables:
        if tools and not self.reads_tools:
            raise UnsupportedCapability("the model's chat template does not read `tools`", "tools")
        if tools and self.tool_syntax is None:
            raise UnsupportedCapability("the model writes tool calls in a way that is not known here", "tools")
        for name in options or ():
            self._check_option(name)
        for place, message in enumerate(messages):
            self._check_message(message, f"messages.{place}")
        shown = [self._history.message(message, f"messages.{place}") for place, message in enumerate(messages)]
        # As transformers does, `tools` is there and None where there are none.
        return {**(options or {}), "messages": shown, "tools": list(tools) if tools else None}

    def _check_option(self, name: str) -> None:
        param = f"chat_template_kwargs.{name}"
        if name in self._reserved:
            raise UnsupportedField(f"`{name}` is given to the chat template by the worker", param)
        if name not in self.variables:
            known = sorted(self.variables - self._reserved)
            reads = f"; it reads {', '.join(known)}" if known else ""
            raise UnsupportedField(f"the model's chat template does not read `{name}`{reads}", param)

    def _check_message(self, message: dict[str, Any], param: str) -> None:
        role = message["role"]
        if message.get("tool_calls") and "tool_calls" not in self._source:
            raise UnsupportedCapability("the model's chat template does not read `tool_calls`", f"{param}.tool_calls")
        # Some templates write a control token around the role.
        named = role in _ROLES or f"'{role}'" in self._source or f'"{role}"' in self._source
        if not named and any(role in control for control in self._controls):
            raise ChatTemplateError(f"the role {role!r} is part of a control token", f"{param}.role")

    def _probe(self, variables: Variables) -> str | None:
        try:
            return self._render({"add_generation_prompt": False, **variables})
        except ChatTemplateError:
            return None

    def _render(self, variables: Variables) -> str:
        pieces: list[str] = []
        size, deadline = 0, time.monotonic() + MAX_RENDER_S
        try:
            for piece in self._template.generate({**self._ours, **variables}):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_PROMPT_CHARS or time.monotonic() > deadline:
                    raise ChatTemplateError("the chat template makes too much of the messages", "messages")
        except _FAULTS as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}", "messages") from None
        return "".join(pieces)

    def _thinking(self, text: str) -> Thinking:
        if self.reasoning is None:
            return "free"
        end = text.rstrip()
        if end.endswith(self.reasoning[0]):
            return "open"
        return "closed" if end.endswith(self.reasoning[1]) else "free"
