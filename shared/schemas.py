"""What comes in: generations, and how to queue them. `shared/results.py` has what goes back.

Pydantic checks at the edges only; unknown fields are refused everywhere. A payload on the queue is a
`GenerationRequest` as JSON, so any RQ user may enqueue one (`docs/rq.md`).
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shared.names import DEFAULT_MODEL, JOB_ID, Priority
from shared.webhooks.url import WebhookUrl

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1, max_length=512)]
JobId = Annotated[str, Field(pattern=f"^{JOB_ID.pattern}$")]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout"]
JobStatus = Literal["queued", "running", "completed", "failed", "cancelled"]

#: Why a job lost its slot: a more urgent one took it, the KV cache was full, or its worker is stopping.
PauseReason = Literal["displaced", "no_room", "drained"]

#: Names of the events of a job. Only `token` has an index; `done` and `failed` are the last of their stream.
TERMINAL_EVENTS = ("done", "failed")


class Strict(BaseModel):
    """Refuses unknown fields and does not turn `"5"` into 5."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), validate_by_name=True)


class Loose(BaseModel):
    """For parts of OpenAI's formats where keys we do not use are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


def _served_type(*served: str) -> BeforeValidator:
    """Refuses objects of another `type` as unsupported instead of as a typing error."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in served:
            kinds = " and ".join(f"`{name}`" for name in served)
            raise PydanticCustomError(
                "unsupported_field", f"`type` {{kind}} is not served, only {kinds}", {"kind": repr(kind[:64])}
            )
        return value

    return BeforeValidator(check)


class TextPart(Loose):
    """One part of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


Part = Annotated[TextPart, _served_type("text")]
#: The names of the two forms never show in errors (`validation.invalid`).
Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Part], Field(min_length=1), Tag("(parts)")],
    Discriminator(lambda value: "(parts)" if isinstance(value, list) else "(text)"),
]
JsonSchema = Annotated[
    Annotated[bool, Tag("(boolean)")] | Annotated[dict[str, Any], Tag("(object)")],
    Discriminator(lambda value: "(boolean)" if isinstance(value, bool) else "(object)"),
]


class FunctionCall(Loose):
    """A function the model called; `arguments` is JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Loose):
    """A tool call of an earlier turn."""

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Loose):
    """One turn of a conversation. Only an assistant that calls tools, and a tool, may have nothing to say."""

    role: str = Field(min_length=1, max_length=64)
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        for key in ("audio", "function_call") if isinstance(value, dict) else ():
            if value.get(key) is not None:
                raise PydanticCustomError("unsupported_field", f"`{key}` is not served")
        return value

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.text and not self.tool_calls and self.role != "tool":
            raise ValueError("`content` is empty")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(Strict):
    """A function the model may call; `parameters` is a JSON schema of its arguments."""

    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool the model may use."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Annotated[Tool, _served_type("function")]], Field(min_length=1, max_length=128)]


class ChosenFunction(Strict):
    """The name of one function."""

    name: str


class NamedTool(Strict):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, _served_type("function")]


class NamedSchema(Strict):
    """A JSON schema as OpenAI's `response_format` wraps it."""

    name: str = Field("", max_length=64)
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = Field(None, description="Without effect: a schema is always kept to.")


class ResponseFormat(Strict):
    """What form the answer has. A `schema` beside `json_object` is llama.cpp's spelling."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("`json_schema` is missing")
        if self.json_schema is not None and self.schema_ is not None:
            raise ValueError("`schema` and `json_schema` both say what the answer has to be; give one of them")
        if self.type == "text" and (self.json_schema is not None or self.schema_ is not None):
            raise ValueError("a schema needs the type `json_schema`")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | bool | None:
        """The JSON schema the answer has to fulfil; None for free text."""
        if self.type == "text":
            return None
        if self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_ if self.schema_ is not None else {"type": "object"}


class Sampling(Strict):
    """How an answer is made, whatever the endpoint calls its prompt. `None` means the worker's own default."""

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
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False
    cache_prompt: bool | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    stream: bool = Field(False, description="The job is meant to be streamed; only shows in telemetry.")
    timeout_s: Finite | None = Field(None, gt=0, le=30 * 86_400, description="Time in a slot.")
    queue_timeout_s: Finite | None = Field(None, gt=0, le=30 * 86_400, description="Time spent waiting.")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.grammar is not None and self.schema_of_answer is not None:
            raise ValueError("give `grammar` or `response_format`, not both")
        for key in self.logit_bias or ():
            # At most ten digits: Python refuses to read thousands.
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**31):
                raise ValueError(f"`logit_bias` key {key!r} is not a token id")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | bool | None:
        """The JSON schema the answer has to fulfil; None for free text."""
        return self.response_format.schema_of_answer if self.response_format else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; null and [] mean none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerationRequest(Sampling):
    """What a worker needs to generate."""

    prompt: str | TokenIds | None = Field(None, description="Text, or token ids taken as they are.")
    messages: list[Message] | None = Field(None, min_length=1, description="Rendered by the model's chat template.")
    fill_context: bool = Field(False, description="Without `max_tokens`: as many tokens as the context has room for.")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=32, description="Variables of the chat template, such as `enable_thinking`."
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Give each token's log probability, and those of this many likely ones."
    )
    embed: bool = Field(False, description="Compute the embedding of `prompt` instead of an answer.")

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        if self.prompt == "":
            raise ValueError("`prompt` is empty")
        if self.embed and self.prompt is None:
            raise ValueError("`embed` needs `prompt`")
        chat_only = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
        lost = next((f for f in chat_only if getattr(self, f) is not None), None)
        if self.messages is None and lost is not None:
            raise ValueError(f"`{lost}` needs `messages`")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        if self.tools is None:
            if self.tool_choice not in (None, "none"):
                raise ValueError("`tool_choice` needs `tools`")
            return
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("`tools` names one function twice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"`tool_choice` names {self.tool_choice.function.name!r}, which is not in `tools`")
        if self.grammar is not None and self.tool_choice != "none":
            raise ValueError("give `grammar` or `tools`, not both")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatSpelling(Strict):
    """What OpenAI's chat endpoint has names of its own for."""

    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of `max_tokens`.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="And those of this many likely ones.")
    reasoning_effort: Effort | None = Field(
        None, description="A variable of the chat template; `none` sets `enable_thinking` to false instead."
    )

    def one_length(self, max_tokens: int | None) -> int | None:
        """The one length that is meant.

        Raises:
            ValueError: both names are given, with different lengths.
        """
        lengths = {max_tokens, self.max_completion_tokens} - {None}
        if len(lengths) > 1:
            raise ValueError("`max_completion_tokens` and `max_tokens` are the same field; give one of them")
        return max_tokens or self.max_completion_tokens

    def likely_tokens(self, logprobs: int | None) -> int | None:
        """`GenerationRequest.logprobs`: how many likely tokens are shown; None where no probability is.

        Raises:
            ValueError: there are to be likely tokens without probabilities.
        """
        wanted = logprobs is not None and logprobs is not False
        if self.top_logprobs is not None and not wanted:
            raise ValueError("`top_logprobs` needs `logprobs`")
        if isinstance(logprobs, bool):
            return (self.top_logprobs or 0) if wanted else None
        return logprobs if self.top_logprobs is None else self.top_logprobs

    def template_variables(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """`chat_template_kwargs` with the effort among them."""
        if self.reasoning_effort is None:
            return given
        off = self.reasoning_effort == "none"
        effort = {"enable_thinking": False} if off else {"reasoning_effort": self.reasoning_effort}
        return effort | (given or {})


class JobRequest(GenerationRequest, ChatSpelling):
    """The body of `POST /v1/jobs`: a generation, and how to queue it.

    It may be spelled as OpenAI's chat endpoint spells it, and is kept as ours.
    """

    logprobs: int | bool | None = Field(
        None, ge=0, le=20, description="Give each token's log probability, and those of this many likely ones."
    )

    id: JobId | None = Field(None, description="Yours, or one of ours. The same id with the same body is the same job.")
    priority: Priority = "normal"
    delay_s: Finite | None = Field(None, gt=0, le=366 * 86_400, description="Start no sooner than this from now.")
    run_at: datetime | None = Field(None, description="Start no sooner than this; ISO 8601 with a time zone.")
    depends_on: JobId | Annotated[list[JobId], Field(min_length=1, max_length=64)] | None = None
    retries: int = Field(0, ge=0, le=100, description="Times to try again after a failure that may pass.")
    result_ttl_s: int | None = Field(None, ge=1, le=366 * 86_400, description="How long the ended job is kept.")
    metadata: dict[str, Any] | None = Field(None, description="Kept with the job and given back; at most 16 KiB.")
    webhook_url: WebhookUrl | None = Field(None, description="Told, by a signed POST, when the job has ended.")

    @field_validator("run_at", mode="before")
    @classmethod
    def _iso_8601(cls, value: Any) -> Any:
        # Pydantic alone would also take "1893456000", as seconds since 1970.
        return datetime.fromisoformat(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _in_our_spelling(self) -> Self:
        self.max_tokens = self.one_length(self.max_tokens)
        self.logprobs = self.likely_tokens(self.logprobs)
        self.chat_template_kwargs = self.template_variables(self.chat_template_kwargs)
        if self.chat_template_kwargs is not None and self.messages is None:
            raise ValueError("`reasoning_effort` needs `messages`")
        self.max_completion_tokens = self.top_logprobs = self.reasoning_effort = None
        return self

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
            mode="json",
            by_alias=True,
            include=set(GenerationRequest.model_fields),
            exclude_defaults=True,
            exclude_none=True,
        )

    def fingerprint(self) -> str:
        """Equal for equal bodies, whatever their spelling, order or id."""
        body = self.model_dump(mode="json", by_alias=True, exclude={"id"}, exclude_none=True)
        if body.get("model") == DEFAULT_MODEL:
            del body["model"]  # what leaving it out means
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _json(metadata: dict[str, Any]) -> str:
    try:
        return json.dumps(metadata, allow_nan=False)
    except ValueError:
        raise ValueError("`metadata` holds NaN or Infinity, which JSON does not have") from None
