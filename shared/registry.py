"""Which models there are and which workers live.

A model's card stays in Redis after its workers are gone, so that jobs are accepted meanwhile. A worker's
figures last a few seconds and are renewed while it lives.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import redis

from shared.errors import UnknownModel
from shared.lua import script
from shared.names import DEFAULT_MODEL, MODELS, WORKERS, model_key, stats_key

#: A worker renews its figures every second; after this long without, it counts as not there.
STATS_TTL_S = 5

T = TypeVar("T", bound="ModelCard | WorkerStats")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the web side must know of a model to check a request without its worker."""

    name: str
    alias: str
    n_ctx: int
    n_vocab: int
    max_request_tokens: int
    has_chat_template: bool
    max_queue: int
    description: str
    #: Of `completion`, `chat`, `tools`, `thinking`, `json_schema`, `grammar` and `embeddings`.
    capabilities: tuple[str, ...] = ("completion",)
    #: Numbers in an embedding; None where the model gives none.
    n_embd: int | None = None
    #: Most tokens its worker lets a job ask for; 0 for no such limit.
    max_tokens_cap: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker's figures. `last_tick_age_s` is the time since its engine last moved, idle or not."""

    worker: str
    model: str
    n_parallel: int
    n_batch: int
    n_ctx: int
    active_slots: int = 0
    idle_slots: int = 0
    prefilling_slots: int = 0
    waiting_requests: int = 0
    queue_depth: int = 0
    #: Seconds that the jobs which ended last were in a slot; None before the first.
    job_s: float | None = None
    last_tick_age_s: float = 0.0
    ticks_total: int = 0
    tokens_total: int = 0
    prompt_tokens_total: int = 0
    kv_used_tokens: int = 0
    cached_tokens: int = 0
    started_at: float = field(default_factory=time.time)
    draining: bool = False
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known at one moment: every model ever served, oldest first, and the live workers, by name."""

    models: list[ModelCard]
    workers: list[WorkerStats]

    def is_live(self, model: str) -> bool:
        """Whether a worker of the model has reported within the last seconds."""
        return any(stats.model == model for stats in self.workers)

    def resolve(self, name: str | None) -> ModelCard | None:
        """The model a request means; None if it names none and no model is known yet.

        Left out or `default` means the only model, or the first that has a live worker, or the first.

        Raises:
            UnknownModel: the name is nobody's; the message lists those there are.
        """
        if name not in (None, DEFAULT_MODEL):
            for card in self.models:
                # A model without an alias has an empty one, which is nobody's name.
                if name == card.name or (name and name == card.alias):
                    return card
            known = ", ".join(card.name for card in self.models) or "none yet; start a worker"
            raise UnknownModel(f"there is no model {_shortened(name or '')!r}; the models are: {known}", "model")
        live = (card for card in self.models if self.is_live(card.name))
        return next(live, self.models[0] if self.models else None)


class Registry:
    """Reads and writes cards and figures."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self._read = script(client, "registry")
        self._last: tuple[float, Known] | None = None

    def register_model(self, card: ModelCard) -> None:
        """Store a model's card; the first registration fixes the model's place in the order."""
        pipe = self.client.pipeline()
        pipe.zadd(MODELS, {card.name: time.time()}, nx=True)
        pipe.hset(model_key(card.name), mapping={k: json.dumps(v) for k, v in asdict(card).items()})
        pipe.execute()

    def report(self, stats: WorkerStats) -> None:
        """Publish a worker's figures for the next `STATS_TTL_S` seconds."""
        self.client.set(stats_key(stats.worker), json.dumps(asdict(stats)), ex=STATS_TTL_S)

    def forget(self, worker: str) -> None:
        """Take a worker's figures away at once."""
        self.client.delete(stats_key(worker))

    def known(self) -> Known:
        """Models and workers, in one round trip."""
        moment = time.monotonic()
        cards, figures = self._read(keys=[MODELS, WORKERS], args=[model_key(""), stats_key("")])
        models = [_known(ModelCard, _parsed(flat)) for flat in cards]
        workers = [_known(WorkerStats, json.loads(raw)) for raw in figures]
        known = Known(models, sorted(workers, key=lambda stats: stats.worker))
        self._last = moment, known
        return known

    def recent(self, max_age_s: float) -> Known | None:
        """What `known` found for anybody, without a round trip; None if that was longer ago."""
        if self._last is None or time.monotonic() - self._last[0] > max_age_s:
            return None
        return self._last[1]

    def models(self) -> list[ModelCard]:
        """Every model ever served, oldest first."""
        return self.known().models

    def workers(self) -> list[WorkerStats]:
        """The figures of every live worker, by name."""
        return self.known().workers

    def resolve(self, name: str | None) -> ModelCard | None:
        """The model a request means; see `Known.resolve`."""
        return self.known().resolve(name)


def _shortened(name: str) -> str:
    return name if len(name) <= 128 else f"{name[:128]}…"


def _parsed(flat: list[bytes]) -> dict[str, Any]:
    """A hash as a script gives it, names and values by turns, whose values are JSON."""
    return {name.decode(): json.loads(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _known(cls: type[T], stored: dict[str, Any]) -> T:
    """Read what another version wrote: fields we do not know are passed over."""
    names = {field.name for field in fields(cls)}
    # JSON has no tuples.
    plain: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in stored.items() if name in names
    }
    return cls(**plain)


def stats_dict(stats: WorkerStats) -> dict[str, Any]:
    """A worker's figures as `/v1/stats` shows them."""
    shown = asdict(stats)
    del shown["metrics"]
    return shown
