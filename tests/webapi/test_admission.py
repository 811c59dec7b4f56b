from __future__ import annotations

import itertools
import time
from typing import Any
from unittest.mock import patch

import pytest
from flask import Flask
from flask.testing import FlaskClient

from shared.ask import Question
from shared.errors import ContextLengthExceeded, InvalidGrammar
from shared.jobs import JobStore
from shared.registry import Registry
from tests.webapi.conftest import MODEL, MakeApp, ScriptedWorker
from webapi.admission import RECENT_S
from webapi.services import services_of

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look_up"}}


def fine(question: Question) -> dict[str, Any]:
    return {"prompt_tokens": 3}


def test_without_any_model_a_job_waits_in_the_default_queue(http: FlaskClient) -> None:
    answer = http.post("/v1/jobs", json={"prompt": "hi"})
    assert answer.status_code == 202
    assert answer.json["model"] == "default"


@pytest.mark.parametrize("name", [None, "default", MODEL, "other-name"])
def test_a_model_is_found_by_name_alias_or_default(http: FlaskClient, worker: ScriptedWorker, name: str | None) -> None:
    worker.register(alias="other-name")
    assert http.post("/v1/jobs", json={"prompt": "hi", "model": name}).json["model"] == MODEL


def test_an_unknown_model_is_404_and_lists_the_models(http: FlaskClient, worker: ScriptedWorker) -> None:
    answer = http.post("/v1/jobs", json={"prompt": "hi", "model": "gpt"})
    assert answer.status_code == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert MODEL in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 1000]}, "prompt"),
        ({"prompt": "a", "logit_bias": {"1000": 1}}, "logit_bias"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(
    http: FlaskClient, store: JobStore, worker: ScriptedWorker, body: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == param
    assert "1000" in answer.json["error"]["message"]
    assert list(store.newest()) == []


def test_messages_to_a_model_without_template_name_the_option(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.register(has_chat_template=False)
    answer = http.post("/v1/jobs", json=CHAT)
    assert answer.status_code == 400
    assert answer.json["error"]["code"] == "chat_template_error"
    assert answer.json["error"]["param"] == "messages"
    assert "`chat_template`" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "capabilities", "param"),
    [
        ({"prompt": "a", "embed": True}, ("completion", "chat"), "model"),
        ({"prompt": "a"}, ("embeddings",), "model"),
        (CHAT | {"tools": [TOOL]}, ("completion", "chat"), "tools"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, ("completion",), "response_format"),
    ],
    ids=["embedding", "answer", "tools", "schema"],
)
def test_what_the_model_cannot_do_is_refused_by_name_without_a_worker(
    http: FlaskClient,
    store: JobStore,
    worker: ScriptedWorker,
    body: dict[str, Any],
    capabilities: tuple[str, ...],
    param: str,
) -> None:
    worker.register(capabilities=capabilities)
    answer = http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json["error"]["code"]) == (400, "unsupported_capability")
    assert answer.json["error"]["param"] == param
    assert list(store.newest()) == []
    worker.register(capabilities=("completion", "chat", "tools", "json_schema", "embeddings"))
    assert http.post("/v1/jobs", json=body).status_code == 202


def test_tools_that_are_not_to_be_used_need_no_model_that_knows_tools(
    http: FlaskClient, worker: ScriptedWorker
) -> None:
    assert http.post("/v1/jobs", json=CHAT | {"tools": [TOOL], "tool_choice": "none"}).status_code == 202


def test_max_tokens_above_the_servers_cap_is_refused(make_app: MakeApp) -> None:
    http = make_app(max_tokens_cap=100).test_client()
    answer = http.post("/v1/jobs", json={"prompt": "a", "max_tokens": 101})
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "max_tokens"
    assert "100" in answer.json["error"]["message"]
    assert http.post("/v1/jobs", json={"prompt": "a", "max_tokens": 100}).status_code == 202


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        {"prompt": "a", "grammar": 'root ::= "a"'},
        {"prompt": "a" * 600},
        {"prompt": "a", "max_tokens": 600},
        {"prompt": [1] * 600},
        {"prompt": "ä" * 300},
        {"prompt": "a", "response_format": {"type": "json_object"}},
    ],
    ids=["messages", "grammar", "long", "many tokens", "many ids", "many bytes", "schema"],
)
def test_what_only_a_worker_knows_is_asked_of_it_first(
    http: FlaskClient, worker: ScriptedWorker, body: dict[str, Any]
) -> None:
    worker.report()
    with worker.answering(fine) as asked:
        assert http.post("/v1/jobs", json=body | {"metadata": {"a": 1}}).status_code == 202
    assert [question.kind for question in asked] == ["check"]
    assert asked[0].body == {"request": body}


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (ContextLengthExceeded("700 tokens do not fit 512", "prompt"), "prompt"),
        (InvalidGrammar("line 1: no rule", "grammar"), "grammar"),
    ],
    ids=["context", "grammar"],
)
def test_a_workers_refusal_is_the_answer_and_nothing_is_queued(
    http: FlaskClient, store: JobStore, worker: ScriptedWorker, error: Exception, param: str
) -> None:
    def refuse(question: Question) -> dict[str, Any]:
        raise error

    worker.report()
    with worker.answering(refuse):
        answer = http.post("/v1/jobs", json={"prompt": "a" * 700, "grammar": "x"})
    assert answer.status_code == 400
    assert answer.json == {"error": error.to_dict()}
    assert answer.json["error"]["param"] == param
    assert list(store.newest()) == []


def test_a_request_that_surely_fits_is_not_asked_about(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.report()
    with worker.answering(fine) as asked:
        assert http.post("/v1/jobs", json={"prompt": "a" * 100, "max_tokens": 300}).status_code == 202
    assert asked == []


def test_without_a_live_worker_nothing_is_asked_and_the_job_is_queued(
    http: FlaskClient, worker: ScriptedWorker
) -> None:
    with worker.answering(fine) as asked:
        assert http.post("/v1/jobs", json=CHAT).status_code == 202
    assert asked == []


def test_a_worker_that_does_not_answer_in_time_does_not_stop_the_job(make_app: MakeApp, worker: ScriptedWorker) -> None:
    worker.report()
    http = make_app(ask_timeout_s=0.05).test_client()
    assert http.post("/v1/jobs", json=CHAT).status_code == 202


def test_a_job_above_the_cap_of_the_models_worker_is_refused(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.register(max_tokens_cap=50)
    answer = http.post("/v1/jobs", json={"prompt": "a", "max_tokens": 51})
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "max_tokens")
    assert http.post("/v1/jobs", json={"prompt": "a", "max_tokens": 50}).status_code == 202


def test_models_and_workers_are_not_read_again_at_once(app: Flask, http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.report()
    read = services_of(app).registry.known
    times: list[float] = []
    with patch.object(Registry, "known", lambda _: times.append(time.monotonic()) or read()):
        for _ in range(50):
            assert http.post("/v1/jobs", json={"prompt": "hi"}).status_code == 202
    assert all(later - earlier > RECENT_S / 2 for earlier, later in itertools.pairwise(times))


def test_a_refusal_is_never_of_what_was_known_a_moment_ago(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.report()
    worker.register(has_chat_template=False)
    assert http.post("/v1/jobs", json=CHAT).status_code == 400
    assert http.post("/v1/jobs", json={"prompt": "a", "model": "later"}).status_code == 404
    worker.register(has_chat_template=True, alias="later")
    with worker.answering(fine):
        assert http.post("/v1/jobs", json=CHAT | {"model": "later"}).status_code == 202
