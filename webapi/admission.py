"""What is checked of a request before it is queued, beyond its shape.

The model's card answers most of it. What only a worker can know, such as a prompt's number of tokens or whether
a grammar parses, is asked of a live one where the answer could be no; without one the job is queued, and the
worker that takes it fails it with the same code.
"""

from __future__ import annotations

import contextlib
import math

from shared.ask import ask
from shared.errors import ChatTemplateError, InvalidGrammar, InvalidRequest, NoWorker
from shared.names import DEFAULT_MODEL
from shared.registry import ModelCard
from shared.schemas import JobRequest
from webapi.services import Services

#: Tokens that a template's start and end may add to a plain prompt.
MARGIN_TOKENS = 8


def admit(services: Services, request: JobRequest) -> str:
    """Check a request and return the name of the model whose queue it goes to.

    Raises:
        UnknownModel: no worker has ever served it.
        InvalidRequest: a value is out of the model's range or above our limits.
        SlotlineError: a live worker refuses the request.
    """
    _check_values(request)
    _check_cap(request, services.settings.max_tokens_cap)
    card = services.registry.resolve(request.model)
    if card is None:
        return DEFAULT_MODEL
    _check_card(request, card)
    if _needs_worker(request, card) and is_live(services, card.name):
        # A worker that does not answer in time is no reason to refuse: the job waits for it.
        with contextlib.suppress(NoWorker):
            body = {"request": request.payload()}
            ask(services.asker, card.name, "check", body, services.settings.ask_timeout_s)
    return card.name


def is_live(services: Services, model: str) -> bool:
    """Whether a worker of the model has reported within the last seconds."""
    return any(stats.model == model for stats in services.registry.workers())


def check_token_ids(ids: list[int], card: ModelCard, field: str) -> None:
    """Refuse ids that are not in the model's vocabulary.

    Raises:
        InvalidRequest: names the first of them.
    """
    for place, token in enumerate(ids):
        if token >= card.n_vocab:
            raise InvalidRequest(
                f"`{field}` item {place}, token id {token}, is out of range: {card.name} has {card.n_vocab} tokens",
                field,
            )


def _check_values(request: JobRequest) -> None:
    """Values that are well formed but cannot be passed on."""
    # llama.cpp reads a grammar up to its first zero character and would ignore the rest.
    for field in ("grammar", "grammar_root"):
        if "\0" in (getattr(request, field) or ""):
            raise InvalidGrammar(f"`{field}` contains a zero character", field)


def _check_cap(request: JobRequest, cap: int) -> None:
    if cap and (request.max_tokens or 0) > cap:
        raise InvalidRequest(
            f"`max_tokens` is {request.max_tokens}; this server allows at most {cap} (SLOTLINE_MAX_TOKENS_CAP)",
            "max_tokens",
        )


def _check_card(request: JobRequest, card: ModelCard) -> None:
    if isinstance(request.prompt, list):
        check_token_ids(request.prompt, card, "prompt")
    for key in request.logit_bias or ():
        if int(key) >= card.n_vocab:
            raise InvalidRequest(
                f"`logit_bias` key {key} is out of range: {card.name} has {card.n_vocab} tokens", "logit_bias"
            )
    if request.messages is not None and not card.has_chat_template:
        raise ChatTemplateError(
            f"{card.name} has no chat template: send `prompt`, or start its worker with the option `chat_template`",
            "messages",
        )


def _needs_worker(request: JobRequest, card: ModelCard) -> bool:
    """Whether a worker could say no. A token is at least one byte, so a short prompt surely fits."""
    if not (request.messages is None and request.grammar is None and request.grammar_root is None):
        return True
    prompt = request.prompt or ""
    longest = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    return longest + (request.max_tokens or 1) + MARGIN_TOKENS > (card.max_request_tokens or math.inf)
