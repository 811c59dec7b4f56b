"""`GET /v1/models`: the models jobs can be sent to, and what each can do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from flask import Response, jsonify
from pydantic import Field

from shared.errors import UnknownModel
from shared.names import MODELS
from shared.registry import ModelCard
from shared.results import ErrorResponse
from shared.schemas import Strict
from webapi.describe import Parameters, blueprint
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
    capabilities: list[str] = Field(
        description="Of `completion`, `chat`, `tools`, `thinking`, `json_schema`, `grammar` and `embeddings`."
    )
    n_embd: int | None = Field(description="Numbers in an embedding; null where the model gives none.")
    live_workers: int


class ModelList(Strict):
    """Every model ever served, oldest first."""

    object: Literal["list"]
    data: list[Model]


class ModelPath(Parameters):
    """The model an address is about."""

    model: str = Field(description="Name or alias; slashes are part of it.")


@bp.get("/v1/models", summary="List the models", responses={200: ModelList})
def models() -> Response:
    """Every model a worker has ever served here. The first that has a live worker is the default."""
    return jsonify({"object": "list", "data": _all_shown(services().registry.models())})


@bp.get("/v1/models/<path:model>", summary="Look at a model", responses={200: Model, 404: ErrorResponse})
def look(path: ModelPath) -> Response:
    """One model, as in the list."""
    card = services().registry.resolve(path.model)
    if card is None:
        raise UnknownModel(f"there is no model {path.model!r} yet; start a worker", "model")
    return jsonify(_all_shown([card])[0])


def _all_shown(cards: Sequence[ModelCard]) -> list[dict[str, Any]]:
    given = services()
    live = Counter(stats.model for stats in given.registry.workers())
    scores: Any = given.client.zrange(MODELS, 0, -1, withscores=True)
    created = {name.decode(): int(score) for name, score in scores}
    return [_shown(card, created.get(card.name, 0), live[card.name]) for card in cards]


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
        "capabilities": list(card.capabilities),
        "n_embd": card.n_embd,
        "live_workers": live_workers,
    }
