"""Reading what a caller sent: bodies as raw JSON, and errors that name the field."""

from __future__ import annotations

import sys
from typing import NoReturn, TypeVar

from flask import request
from pydantic import BaseModel, ValidationError
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, UnsupportedMediaType

from shared.errors import InvalidRequest
from shared.validation import invalid

M = TypeVar("M", bound=BaseModel)


def read_body(model: type[M]) -> M:
    """The JSON body of the current request as a model.

    Raises:
        InvalidRequest: it is not JSON, not UTF-8, not an object, or a field is wrong.
        UnsupportedMediaType, RequestEntityTooLarge: see `read_json`.
    """
    try:
        return model.model_validate_json(read_json())
    except ValidationError as error:
        raise invalid(error, model.model_fields) from None


def read_json() -> bytes:
    """The body of the current request, which is declared as JSON.

    Raises:
        InvalidRequest: it cannot be read.
        UnsupportedMediaType: it is not declared as JSON, as no page of another site can do unasked.
        RequestEntityTooLarge: it is larger than the app's limit.
    """
    if not request.is_json:
        raise UnsupportedMediaType("send the body as JSON, with the header Content-Type: application/json")
    if request.content_encoding not in (None, "", "identity"):
        raise UnsupportedMediaType("send the body as it is, without Content-Encoding")
    try:
        data = request.get_data(cache=False)
    except HTTPException:
        raise
    except Exception as error:
        # The server's own parser of a chunked body, or a connection that broke in the middle of one.
        raise InvalidRequest(f"the body cannot be read: {error}") from None
    if request.content_length is None and len(data) >= (request.max_content_length or sys.maxsize):
        # Werkzeug stops reading a chunked body at the limit without a word.
        raise RequestEntityTooLarge
    return data


def refuse(error: ValidationError) -> NoReturn:
    """Raise what the OpenAPI library found wrong in a path or query."""
    raise invalid(error) from None
