"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from shared.openai.body import read
from shared.openai.call import Call
from shared.openai.choices import ChoicesExchange, ChoicesRequest
from shared.openai.fields import CHAT
from shared.schemas import ChatSpelling, Message, ToolChoice, Tools


class ChatRequest(ChoicesRequest, ChatSpelling):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = Field(False, description="Give each token's log probability.")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=32, description="Variables of the chat template, such as `enable_thinking`."
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        self.one_length(self.max_tokens)
        self.likely_tokens(self.logprobs)
        return self

    def exchange(self) -> ChatExchange:
        """The call as jobs.

        Raises:
            InvalidRequest: names the field.
        """
        prompt = {
            "messages": [_known_role(message) for message in self.messages],
            "max_tokens": self.one_length(self.max_tokens),
            "logprobs": self.likely_tokens(self.logprobs),
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.template_variables(self.chat_template_kwargs),
        }
        return ChatExchange(
            model=self.model,
            stream=self.stream,
            include_usage=self.include_usage,
            background=self.background,
            requests=self.choices_of(prompt),
            per_prompt=self.n,
        )


def read_chat(body: bytes | dict[str, Any]) -> ChatExchange:
    """Check the body of a chat completion.

    Raises:
        InvalidRequest: names the field.
    """
    return read(ChatRequest, CHAT, body).exchange()


class ChatExchange(ChoicesExchange):
    """A chat completion."""

    __slots__ = ()
    PREFIX = "chatcmpl-"
    ANSWER = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def answer(self, call: Call, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer (`ChatCompletion` of the SDK)."""
        choices = [
            {
                "index": index,
                "message": _message(final),
                "logprobs": _logprobs(final["logprobs"]),
                "finish_reason": final["finish_reason"],
            }
            for index, final in enumerate(finals)
        ]
        return self._answer(call, finals, choices)

    def opening(self, call: Call, choice: int) -> dict[str, Any]:
        """The chunk with the role."""
        return self._chunk(call, _delta(choice, {"role": "assistant", "content": ""}))

    def chunk(self, call: Call, choice: int, event: dict[str, Any]) -> dict[str, Any] | None:
        """What a token adds to content, reasoning, tool calls and log probabilities; None for nothing."""
        delta: dict[str, Any] = {}
        if event.get("reasoning_content"):
            delta["reasoning_content"] = event["reasoning_content"]
        if event.get("tool_calls"):
            delta["tool_calls"] = [_call_delta(piece) for piece in event["tool_calls"]]
        logprobs = event.get("logprobs")
        if event["text"] or (logprobs and not delta):
            delta["content"] = event["text"]
        if not delta:
            return None
        return self._chunk(call, _delta(choice, delta, _logprobs(logprobs and [logprobs])))

    def closing(self, call: Call, choice: int, final: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the `finish_reason`."""
        return self._chunk(call, _delta(choice, {}, finish_reason=final["finish_reason"]))


def _known_role(message: Message) -> Message:
    """`developer` is OpenAI's newer name of `system`, which is what chat templates know."""
    return message.model_copy(update={"role": "system"}) if message.role == "developer" else message


def _message(final: Mapping[str, Any]) -> dict[str, Any]:
    calls = final["tool_calls"]
    message = {"role": "assistant", "content": final["text"] or (None if calls else ""), "refusal": None}
    if final["reasoning_content"] is not None:
        message["reasoning_content"] = final["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    return message


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _call_delta(piece: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which some clients would put in place of what they have."""
    function = {name: value for name, value in piece["function"].items() if value is not None}
    return {name: value for name, value in piece.items() if value is not None} | {"function": function}


def _logprobs(tokens: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    return None if tokens is None else {"content": list(tokens), "refusal": None}
