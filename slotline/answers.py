"""What the server's answers mean: an error of ours, JSON, or an event stream."""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from slotline.errors import ApiError, ProtocolError


def api_error(response: httpx.Response) -> ApiError:
    """The server's error; whatever is not of our form becomes one that shows the start of the answer."""
    retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), str(error["code"]), error.get("param")
        kind = str(error.get("type") or "unknown")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ApiError(response.text.strip()[:200] or "no message", response.status_code, retry_after_s=retry_after_s)
    return ApiError(message, response.status_code, code, param, retry_after_s, kind)


def check_events(response: httpx.Response) -> None:
    """Make sure that a response, which has not been read yet, is an event stream.

    Raises:
        ApiError, ProtocolError: it is not.
    """
    if not response.is_success:
        response.read()
        raise api_error(response)
    if response.status_code != 200 or not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        raise ProtocolError(f"{response.url} answered {response.status_code} without an event stream")


def json_of(response: httpx.Response) -> Any:
    """The JSON of a successful answer; None if it has no body.

    Raises:
        ProtocolError: it is something else.
    """
    try:
        return response.json() if response.content else None
    except ValueError:
        raise ProtocolError(f"{response.url} did not answer with JSON: is it a Slotline server?") from None


def _retry_after_s(value: str | None) -> float | None:
    if value is None:
        return None
    # Seconds, or a date (RFC 9110); anything else says nothing.
    with suppress(ValueError):
        return max(0.0, float(value))
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
