"""The four forms a prompt or an input may have, as one list of texts and lists of token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from shared.schemas import TokenIds

Prompt = str | list[int]


def _as_list(value: Any) -> list[Prompt]:
    """The prompts, each checked.

    Raises:
        PydanticCustomError: says which of them is wrong.
    """
    if value == []:
        raise PydanticCustomError("prompts", "the list is empty")
    # A list that begins with a number can only be meant as token ids.
    many = isinstance(value, list) and not isinstance(value[0], int | float)
    prompts = value if many else [value]
    for place, prompt in enumerate(prompts):
        if fault := _fault(prompt):
            raise PydanticCustomError("prompts", "{fault}", {"fault": f"item {place} {fault}" if many else fault})
    if len({type(prompt) for prompt in prompts}) > 1:
        raise PydanticCustomError("prompts", "the list has texts and lists of token ids; give one or the other")
    return prompts


def _fault(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "is empty"
    if not isinstance(prompt, list):
        return "is neither text nor a list of token ids"
    if not prompt:
        return "is an empty list of token ids"
    wrong = next((place for place, token in enumerate(prompt) if not _is_token_id(token)), None)
    return None if wrong is None else f"has {repr(prompt[wrong])[:40]} at place {wrong}, which is no token id"


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


#: Text, token ids, or a list of one of the two.
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(
        _as_list, json_schema_input_type=str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1)]
    ),
]
