"""What the two endpoints that generate have in common: their fields, one job for each choice, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from shared.names import Priority
from shared.openai.body import job
from shared.openai.call import Call
from shared.schemas import JobRequest, Sampling, Strict

MAX_N = 128
#: Most choices of one call, over all its prompts.
MAX_CHOICES = 2048


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage.")
    include_obfuscation: bool | None = Field(None, description="Without effect.")


class ChoicesRequest(Sampling):
    """Fields of both endpoints that generate."""

    n: int = Field(1, ge=1, le=MAX_N, description="Choices for each prompt.")
    stream: bool = Field(False, description="Answer with Server-Sent Events, as the tokens come.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Kept in the job's metadata as `user`.")
    metadata: dict[str, str] | None = Field(None, description="Kept with the jobs; at most 16 KiB.")
    priority: Priority = "interactive"
    background: bool = Field(False, description="The jobs go on when the caller leaves.")

    @model_validator(mode="after")
    def _streams_with_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream`")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def choices_of(self, prompt: dict[str, Any]) -> list[JobRequest]:
        """The jobs of one prompt: choice i of it takes `seed + i`, so that choices differ and can be had again.

        Args:
            prompt: the fields of the job that are not the same for every endpoint.

        Raises:
            InvalidRequest: names the field.
        """
        common = {name: getattr(self, name) for name in Sampling.model_fields}
        user = {} if self.user is None else {"user": self.user}
        metadata = user | (self.metadata or {})
        fields = {"fill_context": True, "priority": self.priority, "metadata": metadata or None}
        first = job(common | fields | prompt)
        if self.seed is None or self.seed < 0:
            return [first] * self.n
        return [first.model_copy(update={"seed": (self.seed + i) % 2**63}) for i in range(self.n)]


@dataclass(slots=True)
class ChoicesExchange:
    """What is the same in the answers and chunks of both endpoints. `per_prompt` choices have a prompt in common."""

    model: str | None
    stream: bool
    include_usage: bool
    background: bool
    requests: list[JobRequest]
    per_prompt: int

    #: What the ids of the endpoint begin with, and what its answers and chunks call themselves.
    PREFIX: ClassVar[str]
    ANSWER: ClassVar[str]
    CHUNK: ClassVar[str]

    def jobs(self) -> list[JobRequest]:
        """One job for each choice, those of the first prompt first; without ids."""
        return list(self.requests)

    def usage_chunk(self, call: Call, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`: no choices, the usage of all."""
        return self._envelope(call, self.CHUNK, []) | {"usage": self._usage(finals)}

    def _answer(self, call: Call, finals: Sequence[dict[str, Any]], choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope(call, self.ANSWER, choices) | {"usage": self._usage(finals)}

    def _chunk(self, call: Call, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope(call, self.CHUNK, [choice])
        # Clients add up whatever usage they see, so that only the last chunk may have one.
        return chunk | {"usage": None} if self.include_usage else chunk

    def _envelope(self, call: Call, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.PREFIX + call.id,
            "object": kind,
            "created": call.created,
            "model": call.model,
            "choices": choices,
        }

    def _usage(self, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A prompt counts once, however many choices it has; what no choice had to compute counts as cached."""
        all_usages = [final["usage"] for final in finals]
        groups = [all_usages[at : at + self.per_prompt] for at in range(0, len(all_usages), self.per_prompt)]
        prompt_tokens = sum(group[0]["prompt_tokens"] for group in groups)
        completion_tokens = sum(usage["completion_tokens"] for usage in all_usages)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(min(usage["cached_tokens"] for usage in group) for group in groups)
            },
        }
