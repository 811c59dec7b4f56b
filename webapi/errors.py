"""From errors to HTTP: JSON for whatever goes wrong."""

from __future__ import annotations

import logging

from flask import Flask, Response, jsonify, request
from redis.exceptions import RedisError
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge

from shared import errors as tree
from shared.connection import is_full, is_outage
from shared.errors import BodyTooLarge, InternalError, QueueFull, RedisUnavailable, SlotlineError
from shared.http_status import STATUS

log = logging.getLogger(__name__)

#: What a caller is told to wait when something behind the API is not there.
RETRY_AFTER_S = 5


def register(app: Flask) -> None:
    """Make the app answer every error as JSON."""
    app.register_error_handler(SlotlineError, answer)
    app.register_error_handler(RedisError, _redis_failed)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _defect)


def answer(error: SlotlineError) -> Response:
    """The HTTP answer to an error of ours."""
    response = jsonify({"error": error.to_dict()})
    response.status_code = STATUS[type(error)]
    if isinstance(error, QueueFull):
        response.headers["Retry-After"] = str(error.retry_after_s)
    elif response.status_code == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _redis_failed(error: RedisError) -> Response:
    if is_full(error):
        log.warning("Redis is full: %s", error)
        return answer(RedisUnavailable("Redis is full and stores nothing more; try again later"))
    if is_outage(error):
        log.warning("Redis is away: %s: %s", type(error).__name__, error)
        return answer(RedisUnavailable("Redis does not answer or refuses to for now; try again later"))
    return _defect(error)


def _http_error(error: HTTPException) -> Response:
    """An error of Flask's or Werkzeug's own, with its headers (`Allow`, …) kept."""
    if isinstance(error, RequestEntityTooLarge):
        return answer(_too_large())
    body: dict[str, str | None] = {"message": _message(error), "type": _kind(error.code or 500), "param": None}
    body["code"] = error.name.lower().replace(" ", "_")
    response = jsonify({"error": body})
    response.status_code = error.code or 500
    for name, value in error.get_headers():
        if name.lower() != "content-type":
            response.headers[name] = value
    return response


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {request.max_content_length} bytes (SLOTLINE_MAX_BODY_BYTES)")


def _message(error: HTTPException) -> str:
    if isinstance(error, NotFound):
        return f"there is nothing at {request.path}"
    if isinstance(error, MethodNotAllowed):
        return f"{request.method} is not possible here; {', '.join(sorted(error.valid_methods or ()))} is"
    return error.description or error.name


def _kind(status: int) -> str:
    if status >= 500:
        return "server_error"
    return tree.KINDS["NotFound"] if status == 404 else tree.KINDS["InvalidRequest"]


def _defect(error: Exception) -> Response:
    log.error("a defect while answering %s %s", request.method, request.path, exc_info=error)
    return answer(InternalError("something went wrong on our side; the server's log has the details"))
