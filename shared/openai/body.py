"""From a body's bytes to the model of its endpoint, with errors that name the field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic_core import from_json

from shared.errors import InvalidRequest
from shared.openai.fields import FieldTable
from shared.schemas import JobRequest
from shared.validation import invalid

M = TypeVar("M", bound=BaseModel)


def read(model: type[M], table: FieldTable, body: bytes | dict[str, Any]) -> M:
    """Check a body; null is the same as leaving a field out.

    A dictionary has to come from a JSON parser that refuses half surrogates, as pydantic's does.

    Raises:
        InvalidRequest: it is no JSON object, or names the field that is wrong or unknown.
        UnsupportedField: it names a field that would change the answer and is not served.
    """
    names = served_fields(model)
    given = table.served(_object(body), names)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise invalid(error, names) from None


def served_fields(model: type[BaseModel]) -> list[str]:
    """The names of a model's fields, with their other spellings."""
    names = []
    for name, info in model.model_fields.items():
        alias = info.validation_alias
        names += [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]
    return names


def job(values: dict[str, Any]) -> JobRequest:
    """A job of the fields given; its own rules hold too.

    Raises:
        InvalidRequest: names the field.
    """
    try:
        return JobRequest.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise invalid(error) from None


def _object(body: bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(body, bytes):
        try:
            body = from_json(body)
        except ValueError as error:
            raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body
