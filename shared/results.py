"""What goes back to the caller: job objects, events, errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shared.schemas import FinishReason, JobStatus, PauseReason, Strict, ToolCall
from shared.webhooks.state import WebhookState


class Usage(Strict):
    """Token counts. The token that ends an answer is not counted and has no event."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = Field(description="Prompt tokens taken from the KV cache instead of computed.")


class Timings(Strict):
    """How the time of one job was spent, in milliseconds and tokens per second."""

    queue_ms: float
    prompt_ms: float
    generation_ms: float
    ttft_ms: float = Field(description="From entering the slot to the first token.")
    duration_ms: float
    prompt_tokens_per_s: float
    generation_tokens_per_s: float


class ErrorBody(Strict):
    """Why something failed."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorResponse(Strict):
    """Every answer with a status of 400 or above."""

    error: ErrorBody


class LikelyToken(Strict):
    """A token, its natural log probability and the bytes it stands for."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(LikelyToken):
    """The chosen token, and the most likely ones, most likely first. Before temperature, penalties and bias."""

    top_logprobs: list[LikelyToken]


class JobObject(Strict):
    """A job as the API shows it. Times are seconds since 1970, UTC."""

    id: str
    object: Literal["job"]
    model: str
    status: JobStatus
    detail: str = Field(description="A finer state: RQ's own, or `cancelling`.")
    priority: str
    position: int | None = Field(description="1 is next; only while queued.")
    created_at: float | None
    enqueued_at: float | None
    started_at: float | None
    ended_at: float | None
    expires_at: float | None = Field(description="When the record is dropped; only once ended.")
    text: str | None = Field(description="So far while running, whole at the end.")
    reasoning_content: str | None = Field(description="What the model thought before its answer, where it does.")
    tool_calls: list[ToolCall] | None = Field(description="The tools the model called.")
    logprobs: list[TokenLogprob] | None = Field(description="One for each token, where asked for.")
    embedding: str | None = Field(description="Base64 of little-endian 32-bit floats, of a job with `embed`.")
    finish_reason: FinishReason | None
    usage: Usage | None
    timings: Timings | None
    seed: int | None = Field(description="The seed that was used.")
    error: ErrorBody | None
    attempts: int = Field(description="Times a worker has taken the job.")
    retries_left: int
    parent: str | None = Field(description="The call of several choices that it belongs to.")
    metadata: dict[str, Any]
    webhook: WebhookState | None = Field(description="What became of the webhook to `webhook_url`.")
    links: dict[str, str]


class JobList(Strict):
    """One page of jobs, newest first. They come without their text."""

    object: Literal["list"]
    data: list[JobObject]
    has_more: bool
    next: str | None = Field(description="Give it as `after` to get the next page.")


class FunctionDelta(Strict):
    """A piece of a call: the name comes first and whole, `arguments` bit by bit."""

    name: str | None = None
    arguments: str = ""


class ToolCallDelta(Strict):
    """A piece of the tool call `index`; its id comes with the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class TokenEvent(Strict):
    """Data of a `token` event. `token` is null for text that was held back to the very end."""

    index: int
    text: str
    token: int | None
    reasoning_content: str | None = Field(None, description="Only there where the text is part of the reasoning.")
    tool_calls: list[ToolCallDelta] | None = Field(None, description="Only there where it is part of tool calls.")
    logprobs: TokenLogprob | None = Field(None, description="Only there where asked for.")


class QueuedEvent(Strict):
    """Data of a `queued` event: the job waits for a slot. Both numbers are estimates, null where there is none."""

    ahead: int | None = Field(description="Jobs that are to be taken before it.")
    estimate_s: float | None = Field(description="Seconds until it gets a slot; null while no worker is there.")


class StartedEvent(Strict):
    """Data of `started`, and of `resumed` after an interruption: the job has a slot."""

    prompt_tokens: int
    tokens: int = Field(description="Tokens generated before, so the index that comes next.")


class ProgressEvent(Strict):
    """Data of a `progress` event: how much of a long prompt is computed, tokens of an interrupted answer included."""

    done: int
    total: int


class PausedEvent(Strict):
    """Data of a `paused` event: the job has lost its slot and goes on later, behind the tokens it has."""

    tokens: int = Field(description="Tokens generated so far, so the index that comes next.")
    reason: PauseReason = Field(
        description="A more urgent job took the slot; the KV cache was full; or the worker is stopping."
    )


class GapEvent(Strict):
    """Data of a `gap` event: events of the log are lost, and this stands for all tokens before the index `tokens`.

    Its texts replace what came before. All three are null where they are lost too, until the end brings the result.
    """

    tokens: int = Field(description="The index that comes next.")
    text: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall] | None
