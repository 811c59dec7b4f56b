"""Errors of pydantic as one sentence that names the field, in the caller's spelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from shared.errors import InvalidRequest, UnsupportedField

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
    "tool_choice": 'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
}

#: Kinds of errors that need no such sentence: pydantic's own, and those that our validators raise.
SAYS_ALL = ("extra_forbidden", "missing", "unsupported_field", "prompts")


def invalid(error: ValidationError, fields: Iterable[str] = ()) -> InvalidRequest:
    """What a validation error says, in one sentence about its first field; `fields` are those there are."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    # Names in brackets are ours: they say which form of a value was tried (`schemas.Content`).
    loc = [part for part in first["loc"] if not str(part).startswith("(")]
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if loc and loc[-1] == "[key]":  # pydantic's way to say that the name itself is wrong
        del loc[-2:]
        message = f"a name in it: {_lower(message)}"
    if loc and loc[0] in EITHER and kind not in SAYS_ALL:
        return InvalidRequest(f"`{loc[0]}` {EITHER[str(loc[0])]}{_which(loc[0], found)}", str(loc[0]))
    if kind in ("value_error", "unsupported_field") and (named := re.match(r"`(\w+)`", message)) and loc:
        # A rule about several fields of one object, which begins with the field to blame.
        loc.append(named[1])
        message = message[named.end() :]
        kind = f"{kind}_named"
    if not loc:
        return _about_the_whole(kind, message)
    path = ".".join(map(str, loc))
    cls = UnsupportedField if kind.startswith("unsupported_field") else InvalidRequest
    return cls(_sentence(path, kind, message, fields), path)


def _which(field: str | int, found: list[Any]) -> str:
    """The item of a list that is wrong, if it is an item."""
    items = [e for e in found if e["loc"][0] == field and len(e["loc"]) > 2]
    return f"; item {items[0]['loc'][2]} is wrong: {_lower(items[0]['msg'])}" if items else ""


def _about_the_whole(kind: str, message: str) -> InvalidRequest:
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON in UTF-8: {message.removeprefix('Invalid JSON: ')}")
    if kind == "model_type":
        return InvalidRequest("the body must be a JSON object")
    named = re.search(r"`(\w+)`", message)
    return InvalidRequest(message, named[1] if named else None)


def _sentence(path: str, kind: str, message: str, fields: Iterable[str]) -> str:
    if kind == "extra_forbidden":
        if path in SPELLINGS:
            return f"`{path}` and `{SPELLINGS[path]}` are the same field; give one of them"
        return unknown(path, fields)
    if kind == "missing":
        return f"`{path}` is required"
    if kind in ("model_type", "dict_type"):
        return f"`{path}` must be an object"
    if kind.endswith("_named"):
        return f"`{path}`{message}"
    return f"`{path}`: {_lower(message)}"


def unknown(path: str, fields: Iterable[str]) -> str:
    """The sentence for a field that there is not; `fields` are those there are."""
    close = [] if "." in path else difflib.get_close_matches(path, list(fields), n=1)
    return f"`{path}` is not a known field" + (f"; did you mean `{close[0]}`?" if close else "")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
