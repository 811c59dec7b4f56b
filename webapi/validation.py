"""Reading what a caller sent: bodies as raw JSON, and errors that name the field."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from flask import request
from pydantic import BaseModel, ValidationError
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, UnsupportedMediaType

from shared.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)

#: The worker's spelling of a field, and ours.
SPELLINGS = {
    "temp": "temperature",
    "penalty_repeat": "repeat_penalty",
    "penalty_freq": "frequency_penalty",
    "penalty_present": "presence_penalty",
}

#: Fields that take more than one type. Pydantic reports each type apart, which helps nobody.
EITHER = {
    "prompt": "must be text or a list of at least one token id",
    "stop": "must be a string of 1 to 512 characters, or a list of at most 64 of them",
    "depends_on": "must be a job id or a list of 1 to 64 job ids",
}


def read_body(model: type[M]) -> M:
    """The JSON body of the current request as a model.

    Raises:
        InvalidRequest: it is not JSON, not UTF-8, not an object, or a field is wrong.
        UnsupportedMediaType: it is not declared as JSON, as no page of another site can do unasked.
        RequestEntityTooLarge: it is larger than the app's limit.
    """
    if not request.is_json:
        raise UnsupportedMediaType("send the body as JSON, with the header Content-Type: application/json")
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
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise invalid(error, model.model_fields) from None


def refuse(error: ValidationError) -> NoReturn:
    """Raise what the OpenAPI library found wrong in a path or query."""
    raise invalid(error) from None


def invalid(error: ValidationError, fields: Iterable[str] = ()) -> InvalidRequest:
    """What a validation error says, in one sentence about its first field; `fields` are those there are."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if field in EITHER and first["type"] != "extra_forbidden":
        return InvalidRequest(f"`{field}` {EITHER[field]}{_which(field, found)}", field)
    if not first["loc"]:
        return _about_the_whole(first["type"], first["msg"])
    path = ".".join(map(str, first["loc"]))
    return InvalidRequest(_sentence(path, first["type"], first["msg"], fields), path)


def _which(field: str, found: list[Any]) -> str:
    """The item of a list that is wrong, if it is an item."""
    items = [e for e in found if e["loc"][0] == field and len(e["loc"]) > 2]
    return f"; item {items[0]['loc'][2]} is wrong: {_lower(items[0]['msg'])}" if items else ""


def _about_the_whole(kind: str, message: str) -> InvalidRequest:
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON in UTF-8: {message.removeprefix('Invalid JSON: ')}")
    if kind == "model_type":
        return InvalidRequest("the body must be a JSON object")
    message = message.removeprefix("Value error, ")
    named = re.search(r"`(\w+)`", message)
    return InvalidRequest(message, named[1] if named else None)


def _sentence(path: str, kind: str, message: str, fields: Iterable[str]) -> str:
    if kind == "extra_forbidden":
        if path in SPELLINGS:
            return f"`{path}` and `{SPELLINGS[path]}` are the same field; give one of them"
        close = [] if "." in path else difflib.get_close_matches(path, list(fields), n=1)
        return f"`{path}` is not a known field" + (f"; did you mean `{close[0]}`?" if close else "")
    if kind == "missing":
        return f"`{path}` is required"
    return f"`{path}`: {_lower(message.removeprefix('Value error, '))}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
