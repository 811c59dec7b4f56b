"""Text to tokens and back, asked of a live worker; no slot is taken."""

from __future__ import annotations

from typing import Annotated, Any

from flask import Response, jsonify
from pydantic import Field

from shared.ask import Kind, ask
from shared.errors import NoWorker
from shared.registry import ModelCard
from shared.results import ErrorResponse
from shared.schemas import Strict
from webapi.admission import check_token_ids
from webapi.describe import blueprint, body_of
from webapi.services import services
from webapi.validation import read_body

bp = blueprint("tokens", "tokens")

MODEL = Field(None, description="Left out or `default`: the only or first model.")


class TokenizeRequest(Strict):
    """Text to turn into tokens."""

    content: str
    model: str | None = MODEL
    add_special: bool = Field(False, description="Begin (and end) as the model wants it, with its special tokens.")
    parse_special: bool = Field(False, description="Read special tokens where the text spells them.")


class DetokenizeRequest(Strict):
    """Tokens to turn into text."""

    tokens: list[Annotated[int, Field(ge=0)]] = Field(description="Token ids.")
    model: str | None = MODEL


class Tokens(Strict):
    """The tokens of a text."""

    tokens: list[int]


class Content(Strict):
    """The text of some tokens."""

    content: str


@bp.post(
    "/v1/tokenize",
    summary="Turn text into tokens",
    request_body=body_of(bp, TokenizeRequest),
    responses={200: Tokens, 404: ErrorResponse, 413: ErrorResponse, 415: ErrorResponse},
)
def tokenize() -> Response:
    """Token ids of a text. 503 while the model has no live worker."""
    asked = read_body(TokenizeRequest)
    card = _served(asked.model)
    return jsonify(_ask(card, "tokenize", asked.model_dump(exclude={"model"})))


@bp.post(
    "/v1/detokenize",
    summary="Turn tokens into text",
    request_body=body_of(bp, DetokenizeRequest),
    responses={200: Content, 404: ErrorResponse, 413: ErrorResponse, 415: ErrorResponse},
)
def detokenize() -> Response:
    """The text of some tokens. 503 while the model has no live worker."""
    asked = read_body(DetokenizeRequest)
    card = _served(asked.model)
    check_token_ids(asked.tokens, card, "tokens")
    return jsonify(_ask(card, "detokenize", {"tokens": asked.tokens}))


def _served(name: str | None) -> ModelCard:
    known = services().registry.known()
    card = known.resolve(name)
    if card is None or not known.is_live(card.name):
        raise NoWorker(f"no worker of model {card.name if card else 'default'!r} is live")
    return card


def _ask(card: ModelCard, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
    given = services()
    return ask(given.asker, card.name, kind, body, given.settings.ask_timeout_s)
