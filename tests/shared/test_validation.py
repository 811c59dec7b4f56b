from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from shared.errors import InvalidRequest, UnsupportedField
from shared.schemas import JobRequest
from shared.validation import EITHER, SPELLINGS, invalid, unknown


def said(body: Any, python: bool = False) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        if python:
            JobRequest.model_validate(body)
        else:
            JobRequest.model_validate_json(json.dumps(body))
    return invalid(caught.value, JobRequest.model_fields)


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "a", "max_token": 5}, "max_token", "`max_token` is not a known field; did you mean `max_tokens`?"),
    ({"prompt": "a", "xyzzy": 5}, "xyzzy", "`xyzzy` is not a known field"),
    (
        {"prompt": "a", "temp": 1, "temperature": 1},
        "temp",
        "`temp` and `temperature` are the same field; give one of them",
    ),
    ({"prompt": [1, "x"]}, "prompt", f"`prompt` {EITHER['prompt']}; item 1 is wrong: input should be a valid integer"),
    ({"prompt": "a", "stop": ""}, "stop", f"`stop` {EITHER['stop']}"),
    ({"prompt": "a", "tool_choice": "any"}, "tool_choice", f"`tool_choice` {EITHER['tool_choice']}"),
    ({}, "prompt", "give either `prompt` or `messages`"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "`messages.0.role` is required"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "`messages.0.content` is empty"),
    ({"messages": ["x"]}, "messages.0", "`messages.0` must be an object"),
    ({"prompt": "a", "response_format": 5}, "response_format", "`response_format` must be an object"),
    (
        {"prompt": "a", "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "`response_format.json_schema` is missing",
    ),
    (
        {"prompt": "a", "response_format": {"type": "text", "schema": {}}},
        "response_format",
        "`response_format`: a schema needs the type `json_schema`",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages.0.content.0.text",
        "`messages.0.content.0.text`: input should be a valid string",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), CASES, ids=str)
@pytest.mark.parametrize("python", [False, True], ids=["json", "python"])
def test_an_error_is_one_sentence_about_its_first_field(
    body: dict[str, Any], param: str, message: str, python: bool
) -> None:
    error = said(body, python)
    assert (type(error), error.param, error.message) == (InvalidRequest, param, message)


def test_what_is_not_served_is_another_error_than_what_is_wrong() -> None:
    error = said({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert (type(error), error.param) == (UnsupportedField, "messages.0.content.0.type")
    assert error.message == "`messages.0.content.0.type` 'image_url' is not served, only `text`"


def test_an_endless_name_is_not_given_back_whole() -> None:
    error = said({"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]})
    assert len(error.message) < 200


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_spellings_are_those_that_the_schema_takes(spelling: str) -> None:
    request = JobRequest.model_validate({"prompt": "a", spelling: 1.5})
    assert getattr(request, SPELLINGS[spelling]) == 1.5


def test_a_path_is_not_compared_with_the_names_of_fields() -> None:
    assert unknown("messages.0", ["messages"]) == "`messages.0` is not a known field"
    assert unknown("mesages", ["messages"]) == "`mesages` is not a known field; did you mean `messages`?"
