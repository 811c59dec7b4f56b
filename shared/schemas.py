"""What travels between client, web and worker: requests, results, events.

Pydantic checks at the edges only; unknown fields are refused everywhere. A payload on the queue is a
`GenerationRequest` as JSON, so any RQ user may enqueue one (`docs/rq.md`).
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from shared.names import DEFAULT_MODEL, JOB_ID, Priority

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=512)]
JobId = Annotated[str, Field(pattern=f"^{JOB_ID.pattern}$")]

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
JobStatus = Literal["queued", "running", "completed", "failed", "cancelled"]

#: Names of the events of a job. Only `token` has an index; `done` and `failed` are the last of their stream.
TERMINAL_EVENTS = ("done", "failed")


class Strict(BaseModel):
    """Refuses unknown fields and does not turn `"5"` into 5."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), validate_by_name=True)


class Message(Strict):
    """One turn of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: str = Field(min_length=1)


class GenerationRequest(Strict):
    """What a worker needs to generate. `None` means the worker's own default."""

    prompt: str | TokenIds | None = Field(None, description="Text, or token ids taken as they are.")
    messages: list[Message] | None = Field(None, min_length=1, description="Rendered by the model's chat template.")
    model: str | None = Field(None, description="Left out or `default`: the only or first model.")

    max_tokens: int | None = Field(None, ge=1, description="Most tokens to generate; left out, 256 or what is left.")
    temperature: Finite | None = Field(None, ge=0, le=10, validation_alias=AliasChoices("temperature", "temp"))
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: Finite | None = Field(None, gt=0, le=1)
    min_p: Finite | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-1, lt=2**63, description="-1 or left out: another one each time.")
    repeat_penalty: Finite | None = Field(
        None, gt=0, le=10, validation_alias=AliasChoices("repeat_penalty", "penalty_repeat")
    )
    frequency_penalty: Finite | None = Field(
        None, ge=-2, le=2, validation_alias=AliasChoices("frequency_penalty", "penalty_freq")
    )
    presence_penalty: Finite | None = Field(
        None, ge=-2, le=2, validation_alias=AliasChoices("presence_penalty", "penalty_present")
    )
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=4096, description="Token id (as text) to what is added to its logit."
    )
    grammar: str | None = Field(None, min_length=1, description="GBNF.")
    grammar_root: str | None = Field(None, min_length=1, max_length=256)
    ignore_eos: bool = False
    cache_prompt: bool | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    stream: bool = Field(False, description="The job is meant to be streamed; only shows in telemetry.")
    timeout_s: Finite | None = Field(None, gt=0, le=30 * 86_400, description="Time in a slot.")
    queue_timeout_s: Finite | None = Field(None, gt=0, le=30 * 86_400, description="Time spent waiting.")

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        if self.prompt == "":
            raise ValueError("`prompt` is empty")
        for key in self.logit_bias or ():
            # At most ten digits: Python refuses to read thousands.
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**31):
                raise ValueError(f"`logit_bias` key {key!r} is not a token id")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; null and [] mean none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class JobRequest(GenerationRequest):
    """The body of `POST /v1/jobs`: a generation, and how to queue it."""

    id: JobId | None = Field(None, description="Yours, or one of ours. The same id with the same body is the same job.")
    priority: Priority = "normal"
    delay_s: Finite | None = Field(None, gt=0, le=366 * 86_400, description="Start no sooner than this from now.")
    run_at: datetime | None = Field(None, description="Start no sooner than this; ISO 8601 with a time zone.")
    depends_on: JobId | Annotated[list[JobId], Field(min_length=1, max_length=64)] | None = None
    retries: int = Field(0, ge=0, le=100, description="Times to try again after a failure that may pass.")
    result_ttl_s: int | None = Field(None, ge=1, le=366 * 86_400, description="How long the ended job is kept.")
    metadata: dict[str, Any] | None = Field(None, description="Kept with the job and given back; at most 16 KiB.")

    @field_validator("run_at", mode="before")
    @classmethod
    def _iso_8601(cls, value: Any) -> Any:
        # Pydantic alone would also take "1893456000", as seconds since 1970.
        return datetime.fromisoformat(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.delay_s is not None and self.run_at is not None:
            raise ValueError("give `delay_s` or `run_at`, not both")
        if self.run_at is not None and self.run_at.tzinfo is None:
            raise ValueError("`run_at` needs a time zone")
        if self.depends_on is not None and (self.delay_s is not None or self.run_at is not None):
            raise ValueError("`depends_on` cannot be combined with `delay_s` or `run_at`")
        if self.metadata is not None and len(_json(self.metadata)) > 16_384:
            raise ValueError("`metadata` is larger than 16 KiB")
        return self

    @property
    def dependencies(self) -> list[str]:
        """`depends_on` as a list without repeats."""
        given = [self.depends_on] if isinstance(self.depends_on, str) else self.depends_on or []
        return list(dict.fromkeys(given))

    def payload(self) -> dict[str, Any]:
        """The part that goes to the worker, as JSON-ready values, without what was left out."""
        return self.model_dump(
            mode="json", include=set(GenerationRequest.model_fields), exclude_defaults=True, exclude_none=True
        )

    def fingerprint(self) -> str:
        """Equal for equal bodies, whatever their spelling, order or id."""
        body = self.model_dump(mode="json", exclude={"id"}, exclude_none=True)
        if body.get("model") == DEFAULT_MODEL:
            del body["model"]  # what leaving it out means
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _json(metadata: dict[str, Any]) -> str:
    try:
        return json.dumps(metadata, allow_nan=False)
    except ValueError:
        raise ValueError("`metadata` holds NaN or Infinity, which JSON does not have") from None


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
    finish_reason: FinishReason | None
    usage: Usage | None
    timings: Timings | None
    seed: int | None = Field(description="The seed that was used.")
    error: ErrorBody | None
    attempts: int = Field(description="Times a worker has taken the job.")
    retries_left: int
    metadata: dict[str, Any]
    links: dict[str, str]


class JobList(Strict):
    """One page of jobs, newest first. They come without their text."""

    object: Literal["list"]
    data: list[JobObject]
    has_more: bool
    next: str | None = Field(description="Give it as `after` to get the next page.")


class TokenEvent(Strict):
    """Data of a `token` event. `token` is null for text that was held back to the very end."""

    index: int
    text: str
    token: int | None
