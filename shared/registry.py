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
    last_tick_age_s: float = 0.0
    ticks_total: int = 0
    tokens_total: int = 0
    prompt_tokens_total: int = 0
    kv_used_tokens: int = 0
    cached_tokens: int = 0
    started_at: float = field(default_factory=time.time)
    draining: bool = False
    metrics: str = ""


class Registry:
    """Reads and writes cards and figures."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one

    def register_model(self, card: ModelCard) -> None:
        """Store a model's card; the first registration fixes the model's place in the order."""
        pipe = self.client.pipeline()
        pipe.zadd(MODELS, {card.name: time.time()}, nx=True)
        pipe.hset(model_key(card.name), mapping={k: json.dumps(v) for k, v in asdict(card).items()})
        pipe.execute()

    def models(self) -> list[ModelCard]:
        """Every model ever served, oldest first."""
        names = [n.decode() for n in self.client.zrange(MODELS, 0, -1)]
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(model_key(name))
        cards = []
        for raw in pipe.execute():
            if raw:
                cards.append(_known(ModelCard, {k.decode(): json.loads(v) for k, v in raw.items()}))
        return cards

    def report(self, stats: WorkerStats) -> None:
        """Publish a worker's figures for the next `STATS_TTL_S` seconds."""
        self.client.set(stats_key(stats.worker), json.dumps(asdict(stats)), ex=STATS_TTL_S)

    def forget(self, worker: str) -> None:
        """Take a worker's figures away at once."""
        self.client.delete(stats_key(worker))

    def workers(self) -> list[WorkerStats]:
        """The figures of every live worker, by name."""
        names = sorted(n.decode() for n in self.client.smembers(WORKERS))
        found = self.client.mget([stats_key(n) for n in names]) if names else []
        return [_known(WorkerStats, json.loads(raw)) for raw in found if raw]

    def resolve(self, name: str | None) -> ModelCard | None:
        """The model a request means; None if it names none and no model is known yet.

        Left out or `default` means the only model, or the first that has a live worker, or the first.

        Raises:
            UnknownModel: the name is nobody's; the message lists those there are.
        """
        cards = self.models()
        if name not in (None, DEFAULT_MODEL):
            for card in cards:
                if name in (card.name, card.alias):
                    return card
            known = ", ".join(c.name for c in cards) or "none yet; start a worker"
            raise UnknownModel(f"there is no model {name!r}; the models are: {known}", "model")
        if len(cards) < 2:
            return cards[0] if cards else None
        live = {stats.model for stats in self.workers()}
        return next((card for card in cards if card.name in live), cards[0])


def _known(cls: type[T], stored: dict[str, Any]) -> T:
    """Read what another version wrote: fields we do not know are passed over."""
    names = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in stored.items() if name in names})


def stats_dict(stats: WorkerStats) -> dict[str, Any]:
    """A worker's figures as `/v1/stats` shows them."""
    shown = asdict(stats)
    del shown["metrics"]
    return shown
