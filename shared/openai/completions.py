"""`/v1/completions`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import Field, model_validator

from shared.openai.body import read
from shared.openai.call import Call
from shared.openai.choices import MAX_CHOICES, ChoicesExchange, ChoicesRequest
from shared.openai.fields import COMPLETIONS
from shared.openai.prompts import Prompts
from shared.schemas import JobRequest


class CompletionRequest(ChoicesRequest):
    """The body of a completion."""

    prompt: Prompts = Field(description="Text or token ids, or a list of them: `n` choices for each.")
    logprobs: int | None = Field(None, ge=0, le=5, description="As in `/v1/jobs`, at most 5.")
    best_of: int | None = Field(None, description="Without effect, and so refused unless it equals `n`.")

    @model_validator(mode="after")
    def _can_be_answered(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("`best_of` may only equal `n`: every choice is given back")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ValueError(f"`prompt` and `n` make {len(self.prompt) * self.n} choices, more than {MAX_CHOICES}")
        return self

    def exchange(self) -> CompletionExchange:
        """The call as jobs.

        Raises:
            InvalidRequest: names the field.
        """
        requests: list[JobRequest] = []
        for prompt in self.prompt:
            requests += self.choices_of({"prompt": prompt, "logprobs": self.logprobs})
        return CompletionExchange(
            model=self.model,
            stream=self.stream,
            include_usage=self.include_usage,
            background=self.background,
            requests=requests,
            per_prompt=self.n,
        )


def read_completion(body: bytes | dict[str, Any]) -> CompletionExchange:
    """Check the body of a completion.

    Raises:
        InvalidRequest: names the field.
    """
    return read(CompletionRequest, COMPLETIONS, body).exchange()


@dataclass(slots=True)
class TextOffsets:
    """Where each token of an answer begins in its text, counted in characters."""

    at: int = 0
    #: A token may be part of a character, which then belongs to the token that ends it.
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def next(self, token: bytes) -> int:
        """The place of the next token."""
        here = self.at
        self.at += len(self.decoder.decode(token))
        return here


@dataclass(slots=True)
class CompletionExchange(ChoicesExchange):
    """A completion of plain prompts."""

    PREFIX = "cmpl-"
    ANSWER = CHUNK = "text_completion"

    offsets: dict[int, TextOffsets] = field(default_factory=dict)

    def answer(self, call: Call, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer (`Completion` of the SDK)."""
        choices = [
            _choice(index, final["text"] or "", _logprobs(final["logprobs"], TextOffsets()), final["finish_reason"])
            for index, final in enumerate(finals)
        ]
        return self._answer(call, finals, choices)

    def opening(self, call: Call, choice: int) -> None:
        """There is nothing to say before the first token."""

    def chunk(self, call: Call, choice: int, event: dict[str, Any]) -> dict[str, Any] | None:
        """What a token adds to the text and the log probabilities; None for nothing."""
        token = event.get("logprobs")
        if not event["text"] and token is None:
            return None
        offsets = self.offsets.setdefault(choice, TextOffsets())
        return self._chunk(call, _choice(choice, event["text"], _logprobs(token and [token], offsets)))

    def closing(self, call: Call, choice: int, final: dict[str, Any]) -> dict[str, Any]:
        """The chunk with the `finish_reason`."""
        return self._chunk(call, _choice(choice, "", finish_reason=final["finish_reason"]))


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: Sequence[dict[str, Any]] | None, offsets: TextOffsets) -> dict[str, Any] | None:
    """*Source:* OpenAI's API reference: the chosen token is always among `top_logprobs`, which may be one more."""
    if tokens is None:
        return None
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [_likely(token) for token in tokens],
        "text_offset": [offsets.next(bytes(token["bytes"])) for token in tokens],
    }


def _likely(token: dict[str, Any]) -> dict[str, float]:
    likely: dict[str, float] = {}
    for one in [*token["top_logprobs"], token]:
        # Two tokens may look the same; the first is the likelier one.
        likely.setdefault(one["token"], one["logprob"])
    return likely
