"""One call of an OpenAI-style endpoint: from its body to jobs, from what becomes of them to its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shared.errors import JobCancelled, SlotlineError, from_dict
from shared.openai.call import Call, Endpoint
from shared.openai.chat import read_chat
from shared.openai.completions import read_completion
from shared.openai.embeddings import read_embeddings
from shared.schemas import JobRequest

__all__ = ["Call", "Endpoint", "Exchange", "failure_of", "read_exchange"]


class Exchange(Protocol):
    """A checked body. Events and job objects are those of `/v1/jobs` (`TokenEvent`, `JobObject`) as dictionaries."""

    #: The model as the body names it.
    model: str | None
    #: Whether the answer is to be streamed, and end with a chunk that has the usage.
    stream: bool
    include_usage: bool
    #: Whether the jobs live on when the caller leaves.
    background: bool

    def jobs(self) -> list[JobRequest]:
        """One job for each choice, in the order of the choices; without ids."""
        ...

    def answer(self, call: Call, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer, from the job objects of the completed jobs, one for each choice."""
        ...

    def opening(self, call: Call, choice: int) -> dict[str, Any] | None:
        """The chunk that comes before a choice's first token, where the endpoint has one."""
        ...

    def chunk(self, call: Call, choice: int, event: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk for the data of a `token` event; None where it adds nothing to see. Events come once, in order."""
        ...

    def closing(self, call: Call, choice: int, final: dict[str, Any]) -> dict[str, Any]:
        """The chunk that ends a choice, with its `finish_reason`."""
        ...

    def usage_chunk(self, call: Call, finals: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The last chunk of a stream with `include_usage`: no choices, the usage of all."""
        ...


READERS: dict[Endpoint, Callable[[bytes | dict[str, Any]], Exchange]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/embeddings": read_embeddings,
}


def read_exchange(endpoint: Endpoint, body: bytes | dict[str, Any]) -> Exchange:
    """Check the body of a call.

    Raises:
        InvalidRequest: names the field; `UnsupportedField` where it is one that would change the answer and is not
            served.
    """
    return READERS[endpoint](body)


def failure_of(final: dict[str, Any]) -> SlotlineError | None:
    """Why a job that is over has no answer; None for a completed one."""
    if final["status"] == "completed":
        return None
    if final["status"] == "cancelled":
        return JobCancelled(f"the job {final['id']} was cancelled")
    return from_dict(final["error"] or {})
