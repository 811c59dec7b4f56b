"""`/v1/embeddings`."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shared.errors import InvalidRequest
from shared.names import Priority
from shared.openai.body import job, read
from shared.openai.call import Call
from shared.openai.fields import EMBEDDINGS
from shared.openai.prompts import Prompts
from shared.schemas import Finite, JobRequest, Strict

MAX_INPUTS = 2048


class EmbeddingRequest(Strict):
    """The body of an embeddings call."""

    input: Prompts = Field(description="Text or token ids, or a list of them: one embedding for each.")
    model: str | None = Field(None, description="Left out or `default`: the only or first model.")
    dimensions: int | None = Field(None, ge=1, description="Keep only the first ones, scaled to length 1 again.")
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = Field(None, max_length=512, description="Kept in the job's metadata as `user`.")
    priority: Priority = "interactive"
    background: bool = Field(False, description="The jobs go on when the caller leaves.")
    timeout_s: Finite | None = Field(None, gt=0, le=30 * 86_400, description="Time in a slot, for each input.")
    queue_timeout_s: Finite | None = Field(None, gt=0, le=30 * 86_400, description="Time spent waiting.")

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if len(self.input) > MAX_INPUTS:
            raise ValueError(f"`input` has {len(self.input)} items, more than {MAX_INPUTS}")
        return self

    def exchange(self) -> EmbeddingExchange:
        """The call as jobs.

        Raises:
            InvalidRequest: names the field.
        """
        common = {
            "embed": True,
            "model": self.model,
            "priority": self.priority,
            "metadata": None if self.user is None else {"user": self.user},
            "timeout_s": self.timeout_s,
            "queue_timeout_s": self.queue_timeout_s,
        }
        return EmbeddingExchange(
            model=self.model,
            background=self.background,
            requests=[job(common | {"prompt": text}) for text in self.input],
            dimensions=self.dimensions,
            as_base64=self.encoding_format == "base64",
        )


def read_embeddings(body: bytes | dict[str, Any]) -> EmbeddingExchange:
    """Check the body of an embeddings call.

    Raises:
        InvalidRequest: names the field.
    """
    return read(EmbeddingRequest, EMBEDDINGS, body).exchange()


@dataclass(slots=True)
class EmbeddingExchange:
    """An embeddings call. It is never streamed: its chunks are for nobody."""

    model: str | None
    background: bool
    requests: list[JobRequest]
    dimensions: int | None
    as_base64: bool
    stream: bool = False
    include_usage: bool = False

    def check(self, n_embd: int | None) -> None:
        """Refuse more dimensions than the model has; None where that is not known.

        Raises:
            InvalidRequest: names both numbers.
        """
        if n_embd is not None and (self.dimensions or 0) > n_embd:
            raise InvalidRequest(
                f"`dimensions` is {self.dimensions}; embeddings of this model have {n_embd}", "dimensions"
            )

    def jobs(self) -> list[JobRequest]:
        """One job for each input."""
        return list(self.requests)

    def answer(self, call: Call, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer (`CreateEmbeddingResponse` of the SDK).

        Raises:
            InvalidRequest: the embeddings are shorter than `dimensions`.
        """
        tokens = sum(final["usage"]["prompt_tokens"] for final in finals)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._embedding(final["embedding"])}
                for index, final in enumerate(finals)
            ],
            "model": call.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _embedding(self, found: str) -> str | list[float]:
        if self.dimensions is None and self.as_base64:
            return found
        raw = base64.b64decode(found)
        numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
        if self.dimensions is not None:
            self.check(len(numbers))
            numbers = _shortened(numbers, self.dimensions)
        if self.as_base64:
            return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
        return list(numbers)

    def opening(self, call: Call, choice: int) -> None:
        """Nothing is streamed."""

    def chunk(self, call: Call, choice: int, event: dict[str, Any]) -> None:
        """Nothing is streamed."""

    def closing(self, call: Call, choice: int, final: dict[str, Any]) -> dict[str, Any]:
        """Nothing is streamed."""
        raise NotImplementedError

    def usage_chunk(self, call: Call, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Nothing is streamed."""
        raise NotImplementedError


def _shortened(numbers: tuple[float, ...], dimensions: int) -> tuple[float, ...]:
    kept = numbers[:dimensions]
    length = math.hypot(*kept)
    return tuple(number / length for number in kept) if length else kept
