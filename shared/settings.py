"""Settings of the web side and of the worker, from flags and `SLOTLINE_…` variables.

They are built once per entry point and passed down; nothing else reads the environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from shared.names import DEFAULT_MODEL, MODEL_NAME
from shared.webhooks.signing import keys_of

PREFIX = "SLOTLINE_"

#: `--model fake:echo` serves the scripted backend; it needs no file.
FAKE_PREFIX = "fake:"

NAME_RULE = "must begin with a letter or digit and hold at most 128 of letters, digits and . _ - / +"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Days = 86_400

#: Never shown, not even where they are wrong.
SECRETS = {"webhook_secret"}

S = TypeVar("S", bound="Settings")


class SettingsError(Exception):
    """A setting has a bad value. The message names the variable and says what is wrong."""


class Settings(BaseSettings):
    """What both sides need: the way to Redis, and how long things are kept."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, protected_namespaces=(), env_ignore_empty=True
    )

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey, 7.0 or newer.")
    redis_timeout_s: Seconds = Field(5.0, description="Time limit of one Redis command.")
    redis_wait_s: float = Field(30.0, ge=0, description="How long to wait for Redis at start before giving up.")
    redis_wait_replicas: int = Field(0, ge=0, description="Replicas that must have a job before it counts as accepted.")
    result_ttl_s: int = Field(Days, gt=0, description="How long a completed or cancelled job is kept.")
    failure_ttl_s: int = Field(7 * Days, gt=0, description="How long a failed job is kept.")
    timeout_s: Seconds = Field(600.0, description="Time in a slot a job may use, unless it says otherwise.")
    max_tokens: int = Field(256, ge=1, description="Tokens a job may generate, unless it says otherwise.")
    max_tokens_cap: int = Field(0, ge=0, description="Most tokens any job may ask for; 0 means no cap but the context.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    files_url: str = Field("", description="Where files and batch results are: a folder or an fsspec URL (s3://…).")
    file_ttl_s: int = Field(30 * Days, gt=0, description="How long files and ended batches are kept.")

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        value = re.sub(r"^valkey(s?)://", r"redis\1://", value)
        if not re.match(r"^(redis|rediss|unix)://", value):
            raise ValueError("must begin with redis://, rediss://, valkey://, valkeys:// or unix://")
        _ = urlsplit(value).port  # raises ValueError where it is no number, or beyond 65535
        return value


class WebSettings(Settings):
    """The HTTP side."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on.")
    web_workers: int = Field(1, ge=1, le=64, description="gunicorn worker processes.")
    max_body_bytes: int = Field(10 * 1024 * 1024, gt=0, description="Largest HTTP body.")
    max_streams: int = Field(1000, ge=1, description="Most open event streams in one web process.")
    keep_alive_s: Seconds = Field(15.0, description="A silent stream gets a comment this often.")
    max_wait_s: Seconds = Field(600.0, description="Most seconds `?wait=` may ask for.")
    ask_timeout_s: Seconds = Field(2.0, description="How long to wait for a live worker's answer to a question.")
    idempotency_ttl_s: int = Field(Days, gt=0, description="How long an Idempotency-Key is remembered.")
    bound_lease_s: Seconds = Field(5.0, description="A dead web process's completions end after this long.")
    max_file_bytes: int = Field(200 * 1024 * 1024, gt=0, description="Largest uploaded file.")
    webhook_secret: str = Field(
        "", repr=False, description="Signs webhooks; whsec_ and base64. Several, with spaces, all sign. Empty: none."
    )
    webhook_allow_private: bool = Field(False, description="Send webhooks to addresses that are not public too.")
    webhook_timeout_s: float = Field(10.0, gt=0, le=60, description="Time limit of one attempt to send a webhook.")
    webhook_backoff_s: Seconds = Field(5.0, description="Wait after a first failed attempt; the next are longer.")
    webhook_retry_s: float = Field(
        float(Days), ge=0, allow_inf_nan=False, description="A webhook is tried again for this long."
    )
    webhook_senders: int = Field(16, ge=1, le=256, description="Webhooks one web process sends at the same time.")

    @field_validator("webhook_secret")
    @classmethod
    def _known_form(cls, value: str) -> str:
        keys_of(value)
        return value.strip()


class BatchSettings(Settings):
    """The process that runs batches."""

    batch_max_lines: int = Field(50_000, ge=1, description="Most lines of one batch.")
    batch_max_line_bytes: int = Field(10 * 1024 * 1024, ge=1, description="Longest line of a batch's input.")
    batch_part_lines: int = Field(1000, ge=1, le=1000, description="Most lines of one part of the results.")
    batch_part_s: float = Field(5.0, gt=0, le=5, description="Results are written at least this often.")
    batch_window: int = Field(0, ge=0, description="Most jobs of one batch at a time; 0: four for each live slot.")
    batch_lease_s: Seconds = Field(5.0, description="A batch whose owner has not renewed its lease goes to another.")
    batches_at_once: int = Field(8, ge=1, le=256, description="Batches one process runs at the same time.")


class WorkerSettings(Settings):
    """The model side. Each field is a flag of `slotline worker` too."""

    model_path: str = Field(description="GGUF file to serve, or fake:echo for the scripted backend.")
    name: str = Field("", description="Name requests use for the model; left out, the file's stem.")
    alias: str = Field("", description="A second name for the model.")
    chat_template: Path | None = Field(None, description="File with a Jinja chat template; left out, the model's own.")

    n_gpu_layers: int = Field(99, ge=-1, description="Layers to put on the GPU; -1 means all.")
    n_ctx: int = Field(
        8192, ge=0, description="Tokens of KV cache, shared by the slots; 0: the model's own, or what memory allows."
    )
    n_parallel: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        4, description="Slots: jobs that generate at once; auto: as many as memory and speed allow."
    )
    n_batch: int = Field(0, ge=0, description="Most tokens in one forward pass; 0 means n_ctx.")
    n_ubatch: int = Field(512, ge=1, description="Most tokens llama.cpp computes at once inside a pass.")
    chunk_size: int = Field(512, ge=1, description="Most prefill tokens of one slot in one tick.")
    max_queue: int = Field(0, ge=0, description="Most waiting jobs of the model; 0 means unlimited.")
    cache_prompt: bool = Field(False, description="Keep a finished slot's KV cache for the next same prefix.")
    batch_strategy: str = Field(
        "decode_maximal",
        description="decode_maximal, prefill_priority, balanced, adaptive, or a dotted path to your own class.",
    )
    itl_target_ms: float = Field(
        100.0, gt=0, le=60_000, description="adaptive: the time between two tokens of an interactive job."
    )
    kv_unified: Literal["auto", "on", "off"] = Field(
        "auto",
        description="One KV buffer for all slots; off: n_ctx / n_parallel each; auto: the faster, while it will do.",
    )
    cached_prefixes: int = Field(
        64, ge=0, le=255, description="Prefixes kept beyond those in slots; with them there are at most 256."
    )
    threads: int = Field(0, ge=0, description="CPU threads for decode; 0: one for each core it may use.")
    threads_batch: int = Field(0, ge=0, description="CPU threads for prefill; 0: as many as for decode.")
    main_gpu: int = Field(0, ge=0, description="The GPU used when the model is not split.")
    split_mode: Literal["none", "layer", "row"] = Field("layer", description="How to split the model over GPUs.")
    tensor_split: str = Field("", description="Share of each GPU, as in 3,1.")
    use_mlock: bool = Field(False, description="Keep the model in RAM.")
    cache_type_k: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = Field("f16", description="Type of the K cache.")
    cache_type_v: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = Field("f16", description="Type of the V cache.")
    flash_attn: Literal["auto", "on", "off"] = Field("auto", description="Flash attention.")
    pooling: Literal["none", "mean", "cls", "last"] = Field(
        "none", description="Serve embeddings instead of answers, pooled this way."
    )

    temp: float = Field(0.8, ge=0, le=10, allow_inf_nan=False, description="Default temperature; 0 is greedy.")
    top_k: int = Field(40, ge=0, description="Default top-k; 0 means off.")
    top_p: float = Field(0.95, gt=0, le=1, description="Default top-p; 1 means off.")
    min_p: float = Field(0.05, ge=0, le=1, description="Default min-p; 0 means off.")
    seed: int = Field(-1, ge=-1, lt=2**63, description="Default seed; -1 means another one for each request.")
    penalty_repeat: float = Field(1.0, gt=0, le=10, allow_inf_nan=False, description="Default repeat penalty; 1: off.")
    penalty_freq: float = Field(0.0, ge=-2, le=2, description="Default frequency penalty.")
    penalty_present: float = Field(0.0, ge=-2, le=2, description="Default presence penalty.")
    grammar: str = Field("", description="Default GBNF grammar.")
    grammar_root: str = Field("root", min_length=1, description="Root rule of the default grammar.")

    flush_s: float = Field(
        0.03,
        ge=0,
        le=1,
        description="Publish tokens this often; a job's first and its end at once. 0: each tick.",
    )
    drain_s: float = Field(20.0, ge=0, description="How long running jobs may go on after SIGTERM.")
    pause_s: float = Field(5.0, ge=0, description="A displaced job waits this long here, then in front of its queue.")
    age_s: Seconds = Field(300.0, description="A job that waits this long is taken in the order of the next priority.")
    lease_s: Seconds = Field(5.0, description="A worker that has not renewed its lease this long counts as dead.")
    stall_timeout_s: float = Field(
        120.0, ge=0, description="A model process whose engine stands still this long is ended and replaced; 0: never."
    )

    @field_validator("n_parallel", mode="wrap")
    @classmethod
    def _slots(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:  # one line for each of the two that it may be
            raise ValueError("must be a number from 1 to 256, or auto") from None

    @field_validator("tensor_split")
    @classmethod
    def _numbers(cls, value: str) -> str:
        for part in filter(None, value.split(",")):
            if not 0 <= float(part) < math.inf:
                raise ValueError("must be shares of 0 or more, as in 3,1")
        return value

    @model_validator(mode="after")
    def _names(self) -> Self:
        for field, value in (("name", self.model_name), ("alias", self.alias)):
            if not value:
                continue
            if not MODEL_NAME.fullmatch(value):
                raise ValueError(f"--{field} (or {PREFIX}{field.upper()}) {value!r}: {NAME_RULE}")
            if value == DEFAULT_MODEL:
                raise ValueError(f"--{field} (or {PREFIX}{field.upper()}) may not be {value!r}, which means any model")
        return self

    @model_validator(mode="after")
    def _batch_holds_every_slot(self) -> Self:
        # What is left open is sized to fit once the model is known (worker/sizing.py).
        if self.n_parallel != "auto" and 0 < self.batch_tokens < self.n_parallel:
            raise ValueError(
                f"n_batch {self.batch_tokens} is below n_parallel {self.n_parallel}: "
                "each slot needs one token in a tick; raise n_batch or lower n_parallel"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name requests use: `name`, or the file's stem with odd characters made `-`."""
        if self.name:
            return self.name
        if self.model_path.startswith(FAKE_PREFIX):
            return self.model_path.replace(":", "-")
        return re.sub(r"[^A-Za-z0-9._+-]", "-", Path(self.model_path).stem).lstrip("-._+") or "model"

    @property
    def batch_tokens(self) -> int:
        """`n_batch`, where 0 means `n_ctx`; 0 where that is left to the model."""
        return self.n_batch or self.n_ctx


def load(cls: type[S], given: Mapping[str, Any] | None = None, otherwise: Mapping[str, Any] | None = None) -> S:
    """Build settings of one kind from the environment, overridden by `given` where not None.

    Args:
        otherwise: values for what neither `given` nor the environment says, instead of the defaults.

    Raises:
        SettingsError: names each bad variable and says what is wrong with it, one line each.
    """
    said = {k: v for k, v in (given or {}).items() if v is not None}
    unsaid = (otherwise or {}).keys() - said.keys() - EnvSettingsSource(cls)().keys()
    try:
        return cls(**said | {k: v for k, v in (otherwise or {}).items() if k in unsaid})
    except ValidationError as error:
        raise SettingsError("\n".join(_line(e, given or {}) for e in error.errors())) from None


def _line(error: Any, given: Mapping[str, Any]) -> str:
    if not error["loc"]:
        return str(error["msg"]).removeprefix("Value error, ")
    field = str(error["loc"][0])
    flag = "--" + field.replace("_", "-")
    name = flag if given.get(field) is not None else f"{PREFIX}{field.upper()}"
    if error["type"] == "missing":
        return f"{flag} (or {PREFIX}{field.upper()}) is required"
    shown = re.sub(r"//[^@/]*@", "//…@", repr(error["input"]))  # a Redis URL may hold a password
    shown = "…" if field in SECRETS else shown
    return f"{name}={shown}: {error['msg'].removeprefix('Value error, ')}"
