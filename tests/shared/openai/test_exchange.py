from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from shared.errors import InternalError, InvalidRequest, JobCancelled, QueueTimeout
from shared.openai.chat import ChatRequest
from shared.openai.completions import CompletionRequest
from shared.openai.embeddings import EmbeddingRequest
from shared.openai.exchange import READERS, Endpoint, failure_of, read_exchange
from tests.shared.openai.ended import cancelled, completed, failed

BODIES: dict[Endpoint, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny"},
    "/v1/completions": {"prompt": "Hi", "model": "tiny"},
    "/v1/embeddings": {"input": "Hi", "model": "tiny"},
}


@pytest.mark.parametrize("endpoint", READERS)
def test_every_endpoint_reads_bytes_and_dictionaries_alike(endpoint: Endpoint) -> None:
    body = BODIES[endpoint]
    exchange = read_exchange(endpoint, body)
    assert exchange.model == "tiny"
    assert exchange.jobs() == read_exchange(endpoint, json.dumps(body).encode()).jobs()
    assert [job.model for job in exchange.jobs()] == ["tiny"]


@pytest.mark.parametrize("endpoint", READERS)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"prompt=a", "not valid JSON"),
        (b'{"model": "\xff\xfe"}', "not valid JSON in UTF-8"),
        ('{"model": "a"}'.encode("utf-16"), "not valid JSON in UTF-8"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'["prompt"]', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
    ids=range(10),
)
def test_a_body_that_is_no_json_object_is_refused(endpoint: Endpoint, body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        read_exchange(endpoint, body)
    assert caught.value.param is None


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_two_spellings_of_one_field_are_refused(endpoint: Endpoint) -> None:
    with pytest.raises(InvalidRequest, match="`temp` and `temperature` are the same field"):
        read_exchange(endpoint, BODIES[endpoint] | {"temp": 1, "temperature": 1})
    (job,) = read_exchange(endpoint, BODIES[endpoint] | {"temp": 0.5}).jobs()
    assert job.temperature == 0.5


MODELS: dict[Endpoint, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
FIELDS = [(endpoint, name) for endpoint, model in MODELS.items() for name in model.model_fields]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "name", "1"]) | st.text(max_size=3), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(st.sampled_from(FIELDS), JSON)
def test_whatever_a_field_holds_it_is_taken_or_refused_by_its_name(field: tuple[Endpoint, str], value: Any) -> None:
    endpoint, name = field
    try:
        jobs = read_exchange(endpoint, BODIES[endpoint] | {name: value}).jobs()
    except InvalidRequest as error:
        assert (error.param or "").split(".")[0] == name
        assert f"`{name}" in error.message
    else:
        assert jobs


def test_a_completed_job_has_not_failed() -> None:
    assert failure_of(completed("x")) is None


def test_a_failed_job_fails_with_its_own_error() -> None:
    error = failure_of(failed("queue_timeout", "waited 3 s", "queue_timeout_s"))
    assert isinstance(error, QueueTimeout)
    assert (error.message, error.param) == ("waited 3 s", "queue_timeout_s")
    assert isinstance(failure_of(failed("from_the_future", "?")), InternalError)


def test_a_cancelled_job_fails_by_saying_so() -> None:
    error = failure_of(cancelled())
    assert isinstance(error, JobCancelled)
    assert error.message == "the job j1 was cancelled"
