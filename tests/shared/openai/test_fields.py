from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam, chat_completion_message_param
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel

from shared.errors import InvalidRequest, UnsupportedField
from shared.openai.body import served_fields
from shared.openai.chat import ChatRequest
from shared.openai.choices import StreamOptions
from shared.openai.completions import CompletionRequest
from shared.openai.embeddings import EmbeddingRequest
from shared.openai.exchange import Endpoint, read_exchange
from shared.openai.fields import CHAT, COMPLETIONS, ELSEWHERE, EMBEDDINGS, FieldTable
from shared.schemas import Message
from shared.validation import SPELLINGS

Known = tuple[type[BaseModel], FieldTable, dict[str, Any]]
ENDPOINTS: dict[Endpoint, Known] = {
    "/v1/chat/completions": (ChatRequest, CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/completions": (CompletionRequest, COMPLETIONS, {"prompt": "Hi"}),
    "/v1/embeddings": (EmbeddingRequest, EMBEDDINGS, {"input": "Hi"}),
}
SDK: dict[Endpoint, Any] = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParams,
    "/v1/completions": completion_create_params.CompletionCreateParams,
    "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
}


def parameters(endpoint: Endpoint) -> set[str]:
    """Every parameter that the SDK can send to an endpoint."""
    forms = get_args(SDK[endpoint]) or (SDK[endpoint],)
    return {name for form in forms for name in form.__annotations__}


ALL = [(endpoint, name) for endpoint in ENDPOINTS for name in sorted(parameters(endpoint))]


def test_the_parameters_of_the_sdk_are_found() -> None:
    assert {"messages", "stream", "stream_options", "tools", "web_search_options"} <= parameters("/v1/chat/completions")
    assert {"prompt", "stream", "best_of", "suffix"} <= parameters("/v1/completions")
    assert parameters("/v1/embeddings") >= {"input", "model", "dimensions", "encoding_format", "user"}


@pytest.mark.parametrize(("endpoint", "name"), ALL)
def test_every_parameter_of_the_sdk_is_served_refused_or_without_effect(endpoint: Endpoint, name: str) -> None:
    model, table, body = ENDPOINTS[endpoint]
    homes = [name in served_fields(model), name in table.refused, name in table.ignored]
    assert homes.count(True) == 1
    # What the SDK sends for a field that is not set.
    assert name in body or read_exchange(endpoint, body | {name: None}).jobs()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_field_is_either_served_refused_or_without_effect(endpoint: Endpoint) -> None:
    model, table, _ = ENDPOINTS[endpoint]
    names = [*served_fields(model), *table.refused, *table.ignored]
    assert len(set(names)) == len(names)
    assert set(table.neutral) <= set(table.refused)


REFUSED = [(endpoint, name) for endpoint, (_, table, _) in ENDPOINTS.items() for name in table.refused]


@pytest.mark.parametrize(("endpoint", "name"), REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(endpoint: Endpoint, name: str) -> None:
    _, table, body = ENDPOINTS[endpoint]
    with pytest.raises(UnsupportedField) as caught:
        read_exchange(endpoint, body | {name: {"any": "value"}})
    assert caught.value.param == name
    assert caught.value.message == f"`{name}` is not served: {table.refused[name]}"


NEUTRAL = [(endpoint, name) for endpoint, (_, table, _) in ENDPOINTS.items() for name in table.neutral]


@pytest.mark.parametrize(("endpoint", "name"), NEUTRAL)
def test_a_refused_field_may_ask_for_what_is_done_anyway(endpoint: Endpoint, name: str) -> None:
    _, table, body = ENDPOINTS[endpoint]
    plain = read_exchange(endpoint, body).jobs()
    assert read_exchange(endpoint, body | {name: table.neutral[name]}).jobs() == plain


def test_zero_is_not_taken_for_false() -> None:
    with pytest.raises(UnsupportedField, match="echo"):
        read_exchange("/v1/completions", {"prompt": "Hi", "echo": 0})


IGNORED = [(endpoint, name) for endpoint, (_, table, _) in ENDPOINTS.items() for name in sorted(table.ignored)]


@pytest.mark.parametrize(("endpoint", "name"), IGNORED)
@pytest.mark.parametrize("value", [True, "x", {"any": [1]}], ids=repr)
def test_a_field_without_effect_changes_nothing_whatever_it_holds(endpoint: Endpoint, name: str, value: Any) -> None:
    body = ENDPOINTS[endpoint][2]
    assert read_exchange(endpoint, body | {name: value}).jobs() == read_exchange(endpoint, body).jobs()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_unknown_field_is_refused_with_the_served_one_it_may_mean(endpoint: Endpoint) -> None:
    body = ENDPOINTS[endpoint][2]
    with pytest.raises(InvalidRequest) as caught:
        read_exchange(endpoint, body | {"modle": "tiny"})
    assert (caught.value.param, type(caught.value)) == ("modle", InvalidRequest)
    assert caught.value.message == "`modle` is not a known field; did you mean `model`?"
    with pytest.raises(InvalidRequest, match="`xyzzy` is not a known field$"):
        read_exchange(endpoint, body | {"xyzzy": None})


def test_every_key_of_the_sdks_messages_is_read_or_passed_over_on_purpose() -> None:
    forms = get_args(chat_completion_message_param.ChatCompletionMessageParam)
    keys = {key for form in forms for key in form.__annotations__}
    refused, passed_over = {"audio", "function_call"}, {"refusal"}
    assert keys == (set(Message.model_fields) - {"reasoning_content"}) | refused | passed_over


def test_every_stream_option_of_the_sdk_is_known() -> None:
    assert set(ChatCompletionStreamOptionsParam.__annotations__) == set(StreamOptions.model_fields)


# --- the page that lists them ---

PAGE = (Path(__file__).parents[3] / "docs" / "openai.md").read_text("utf-8")


def part(endpoint: Endpoint, heading: str) -> str:
    """What stands under a heading of an endpoint."""
    section = PAGE.split(f"\n## `POST {endpoint}`\n")[1].split("\n## ")[0]
    return section.split(f"\n### {heading}\n")[1].split("\n### ")[0]


def first_column(table: str) -> set[str]:
    """The names that the rows of a table begin with."""
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_page_lists_what_is_served(endpoint: Endpoint) -> None:
    assert first_column(part(endpoint, "Served")) == set(served_fields(ENDPOINTS[endpoint][0])) - set(SPELLINGS)


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_the_page_lists_what_is_without_effect(endpoint: Endpoint) -> None:
    assert set(re.findall(r"`(\w+)`", part(endpoint, "Without effect"))) == set(ENDPOINTS[endpoint][1].ignored)


def rows(text: str) -> dict[str, str]:
    """The rows of a table of two columns: name to reason."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_page_lists_what_is_refused_and_why(endpoint: Endpoint) -> None:
    elsewhere = {} if endpoint == "/v1/embeddings" else ELSEWHERE
    own = {name: why for name, why in ENDPOINTS[endpoint][1].refused.items() if name not in elsewhere}
    assert rows(part(endpoint, "Refused")) == own


def test_the_page_lists_the_options_of_other_servers() -> None:
    assert rows(PAGE.split("\n## Options of other servers\n")[1].split("\n## ")[0]) == ELSEWHERE
