"""What is checked of a request before it is queued, beyond its shape.

The model's card answers most of it. What only a worker can know, such as a prompt's number of tokens or whether
a grammar parses, is asked of a live one where the answer could be no; without one the job is queued, and the
worker that takes it fails it with the same code.

Models and workers as they were within the last second are good for a yes; before a no they are read anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from shared.ask import ask
from shared.errors import (
    ChatTemplateError,
    InvalidGrammar,
    InvalidRequest,
    NoWorker,
    SlotlineError,
    UnsupportedCapability,
)
from shared.names import DEFAULT_MODEL
from shared.registry import Known, ModelCard
from shared.schemas import JobRequest
from shared.stream import dumps
from webapi.services import PATIENCE, Services

#: Tokens that a template's start and end may add to a plain prompt.
MARGIN_TOKENS = 8

#: How long models and workers count as they were read: workers renew what is known of them as often.
RECENT_S = 1.0


def admit(services: Services, request: JobRequest) -> str:
    """Check a request and return the name of the model whose queue it goes to.

    Raises:
        UnknownModel: no worker has ever served it.
        InvalidRequest: a value is out of the model's range or above our limits, or the model cannot do it.
        SlotlineError: a live worker refuses the request.
    """
    card, is_live = _resolved(services, [request])
    if card is None:
        return DEFAULT_MODEL
    if is_live and _needs_worker(request, card):
        _ask_if_there(services, [request], card)
    return card.name


def admit_call(services: Services, requests: Sequence[JobRequest], *, must_be_live: bool) -> ModelCard | None:
    """Check the jobs of one call and return their model; None if none is known yet.

    With `must_be_live` there has to be a live worker, since a caller waits for it, and it has the last word.

    Raises:
        NoWorker: there has to be a live worker and there is none, or it did not answer in time.
        UnknownModel, InvalidRequest, SlotlineError: as `admit`.
    """
    card, is_live = _resolved(services, requests)
    if card is None or not is_live:
        if must_be_live:
            raise NoWorker(f"no worker of model {card.name if card else DEFAULT_MODEL!r} is live; try again later")
        return card
    asked = [request for request in _distinct(requests) if _needs_worker(request, card)]
    if must_be_live:
        _ask(services, asked, card, PATIENCE * services.settings.ask_timeout_s)
    else:
        _ask_if_there(services, asked, card)
    return card


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


def _resolved(services: Services, requests: Sequence[JobRequest]) -> tuple[ModelCard | None, bool]:
    """The model that all requests name, checked, None if none is known yet; and whether a worker of it is live."""
    recent = services.registry.recent(RECENT_S)
    if recent is not None:
        # Whatever is wrong may be so no more, and is found again if it is.
        with contextlib.suppress(SlotlineError):
            card = _checked(services, requests, recent)
            if card is not None and recent.is_live(card.name):
                return card, True
    known = services.registry.known()
    card = _checked(services, requests, known)
    return card, card is not None and known.is_live(card.name)


def _checked(services: Services, requests: Sequence[JobRequest], known: Known) -> ModelCard | None:
    """The model that all requests name, after every check that needs no worker; None if none is known yet."""
    for request in requests:
        _check_values(request)
        _check_cap(request, services.settings.max_tokens_cap)
    card = known.resolve(requests[0].model)
    if card is not None:
        for request in requests:
            _check_cap(request, card.max_tokens_cap)
            _check_capabilities(request, card)
            _check_card(request, card)
    return card


def _distinct(requests: Sequence[JobRequest]) -> list[JobRequest]:
    """One of those that differ in nothing but the seed."""
    return list({dumps(request.payload() | {"seed": None}): request for request in requests}.values())


def _ask(services: Services, requests: Sequence[JobRequest], card: ModelCard, timeout_s: float) -> None:
    for request in requests:
        ask(services.asker, card.name, "check", {"request": request.payload()}, timeout_s)


def _ask_if_there(services: Services, requests: Sequence[JobRequest], card: ModelCard) -> None:
    """A worker that does not answer in time is no reason to refuse: the jobs wait for it."""
    with contextlib.suppress(NoWorker):
        _ask(services, requests, card, services.settings.ask_timeout_s)


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


def _check_capabilities(request: JobRequest, card: ModelCard) -> None:
    """What the model cannot do at all, each with the field that asks for it."""
    able = card.capabilities
    if request.embed and "embeddings" not in able:
        raise UnsupportedCapability(
            f"{card.name} gives no embeddings: start a worker of it with the option `pooling`", "model"
        )
    if not request.embed and "completion" not in able:
        raise UnsupportedCapability(f"{card.name} gives {', '.join(able)} only, no answers", "model")
    if request.tools and request.tool_choice != "none" and "tools" not in able:
        raise UnsupportedCapability(f"the chat template of {card.name} knows no tools", "tools")
    if request.schema_of_answer is not None and "json_schema" not in able:
        raise UnsupportedCapability(f"{card.name} cannot be held to a JSON schema", "response_format")


def _needs_worker(request: JobRequest, card: ModelCard) -> bool:
    """Whether a worker could say no. A token is at least one byte, so a short prompt surely fits."""
    compiled = (request.messages, request.grammar, request.grammar_root, request.schema_of_answer)
    # An embedding has to fit a pass, whose size the card does not tell.
    if request.embed or any(field is not None for field in compiled):
        return True
    prompt = request.prompt or ""
    longest = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    return longest + (request.max_tokens or 1) + MARGIN_TOKENS > (card.max_request_tokens or math.inf)
