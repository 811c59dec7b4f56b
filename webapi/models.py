"""`GET /v1/models`: the models jobs can be sent to."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from flask import Response, jsonify

from shared.names import MODELS
from shared.registry import ModelCard
from shared.schemas import Strict
from webapi.describe import blueprint
from webapi.services import services

bp = blueprint("models", "models")


class Model(Strict):
    """A model. It stays listed, and takes jobs, while it has no live worker."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    alias: str
    description: str
    n_ctx: int
    max_request_tokens: int
    has_chat_template: bool
    live_workers: int


class ModelList(Strict):
    """Every model ever served, oldest first."""

    object: Literal["list"]
    data: list[Model]


@bp.get("/v1/models", summary="List the models", responses={200: ModelList})
def models() -> Response:
    """Every model a worker has ever served here. The first that has a live worker is the default."""
    given = services()
    live = Counter(stats.model for stats in given.registry.workers())
    scores: Any = given.client.zrange(MODELS, 0, -1, withscores=True)
    created = {name.decode(): int(score) for name, score in scores}
    data = [_shown(card, created.get(card.name, 0), live[card.name]) for card in given.registry.models()]
    return jsonify({"object": "list", "data": data})


def _shown(card: ModelCard, created: int, live_workers: int) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "slotline",
        "alias": card.alias,
        "description": card.description,
        "n_ctx": card.n_ctx,
        "max_request_tokens": card.max_request_tokens,
        "has_chat_template": card.has_chat_template,
        "live_workers": live_workers,
    }
