"""The endpoints that OpenAI's clients know: chat completions, completions, embeddings.

They go over the same queue as `/v1/jobs`. What the bodies and answers look like is the business of `shared/openai`.
"""

from __future__ import annotations

from typing import Any

from flask import Response, jsonify, request

from shared.errors import SlotlineError
from shared.openai.chat import ChatRequest
from shared.openai.completions import CompletionRequest
from shared.openai.embeddings import EmbeddingRequest
from shared.openai.exchange import Endpoint, read_exchange
from shared.results import ErrorResponse
from webapi import errors
from webapi.calls import CallerLeft, OpenCall
from webapi.chunks import chunk_frames
from webapi.describe import blueprint, body_of
from webapi.services import services
from webapi.sse import HEADERS
from webapi.validation import read_json

bp = blueprint("openai", "OpenAI")

JOB_ID_HEADER = "X-Slotline-Job-Id"

#: What is noted of a caller who left before the answer; nobody reads it. *Source:* nginx, "client closed request".
CALLER_LEFT = 499


def _answer_of(kind: str, *, streams: bool = True) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    ids = "Id of the job, or ids in the order of the choices; of more than 64, what all of them begin with."
    return {
        "description": f"As OpenAI's API has it: {kind}.",
        "headers": {JOB_ID_HEADER: {"description": ids, "schema": {"type": "string"}}},
        "content": content,
    }


def _responses(kind: str, *, streams: bool = True) -> dict[Any, Any]:
    refusals = dict.fromkeys((404, 409, 413, 415, 422, 429, 504), ErrorResponse)
    return {200: _answer_of(kind, streams=streams), **refusals}


@bp.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    request_body=body_of(bp, ChatRequest),
    responses=_responses("a `chat.completion`, or with `stream` chunks of one"),
)
def chat_completions() -> Response:
    """Render the messages with the model's chat template and generate `n` answers.

    The jobs are cancelled when the caller leaves, unless `background` is true.
    """
    return _serve("/v1/chat/completions")


@bp.post(
    "/v1/completions",
    summary="Go on with a text",
    request_body=body_of(bp, CompletionRequest),
    responses=_responses("a `text_completion`, or with `stream` chunks of one"),
)
def completions() -> Response:
    """Generate `n` texts for each prompt.

    The jobs are cancelled when the caller leaves, unless `background` is true.
    """
    return _serve("/v1/completions")


@bp.post(
    "/v1/embeddings",
    summary="Compute embeddings",
    request_body=body_of(bp, EmbeddingRequest),
    responses=_responses("a list of `embedding`", streams=False),
)
def embeddings() -> Response:
    """One embedding for each input, of a model whose worker was started for embeddings."""
    return _serve("/v1/embeddings")


def _serve(endpoint: Endpoint) -> Response:
    exchange = read_exchange(endpoint, read_json())
    try:
        call = OpenCall(services(), exchange, request.environ)
    except CallerLeft:
        return Response(status=CALLER_LEFT)
    response = _stream(call) if exchange.stream else _whole(call)
    response.headers[JOB_ID_HEADER] = call.job_ids
    return response


def _stream(call: OpenCall) -> Response:
    response = Response(chunk_frames(call), content_type="text/event-stream", headers=HEADERS)
    response.call_on_close(call.close)
    return response


def _whole(call: OpenCall) -> Response:
    try:
        return jsonify(call.answer())
    except CallerLeft:
        return Response(status=CALLER_LEFT)
    except SlotlineError as error:
        response = errors.answer(error)
        if not error.retryable:
            # *Source:* the `openai` SDK, which else repeats what is answered by 409 or 500.
            response.headers["X-Should-Retry"] = "false"
        return response
    finally:
        call.close()
