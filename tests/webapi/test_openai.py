"""What callers of the OpenAI-style endpoints see, without streams."""

from __future__ import annotations

import base64
import struct
import threading
from typing import Any

import pytest
import redis
from flask.testing import FlaskClient

from shared.ask import Question
from shared.errors import ContextLengthExceeded, DecodeFailed, GenerationTimeout, GrammarDeadEnd, InvalidRequest
from shared.jobs import JobStore, request_of
from shared.work import Pulled
from tests.webapi.conftest import MODEL, MakeApp, ScriptedWorker

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "hi"}, "/v1/embeddings": {"input": "hi"}}
HEADER = "X-Slotline-Job-Id"

every_endpoint = pytest.mark.parametrize("path", BODIES)


def test_a_chat_is_answered_as_openai_does(http: FlaskClient, store: JobStore, worker: ScriptedWorker) -> None:
    with worker.serving(lambda job: worker.run(job, ["he", "llo"])) as asked:
        answer = http.post("/v1/chat/completions", json=CHAT | {"model": MODEL, "user": "u1"})
    assert answer.status_code == 200
    assert answer.json["object"] == "chat.completion"
    assert answer.json["model"] == MODEL
    assert answer.json["choices"][0]["message"]["content"] == "hello"
    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.json["usage"]["total_tokens"] == 5
    job_id = answer.headers[HEADER]
    assert answer.json["id"] == f"chatcmpl-{job_id}"
    record = store.fetch(job_id)
    assert (record.priority, record.metadata, record.parent) == ("interactive", {"user": "u1"}, None)
    assert [question.kind for question in asked] == ["check"]


def test_a_completion_is_answered_for_each_prompt_and_choice_in_order(
    http: FlaskClient, store: JobStore, worker: ScriptedWorker
) -> None:
    def echo(job: Pulled) -> None:
        request = request_of(job.record)
        worker.run(job, [request["prompt"], str(request["seed"])])

    with worker.serving(echo):
        answer = http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "seed": 7})
    assert answer.status_code == 200
    assert [choice["text"] for choice in answer.json["choices"]] == ["a7", "a8", "b7", "b8"]
    call_id = answer.json["id"].removeprefix("cmpl-")
    assert answer.headers[HEADER].split(", ") == [f"{call_id}-{number}" for number in range(4)]
    assert {store.fetch(f"{call_id}-{number}").parent for number in range(4)} == {call_id}


def test_embeddings_are_answered_for_each_input(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.register(capabilities=("embeddings",), n_embd=2)
    given = base64.b64encode(struct.pack("<2f", 0.6, 0.8)).decode()
    with worker.serving(lambda job: worker.finish(job, "", 0, embedding=given)):
        answer = http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert answer.status_code == 200
    assert [item["index"] for item in answer.json["data"]] == [0, 1]
    assert answer.json["data"][1]["embedding"] == pytest.approx([0.6, 0.8])
    assert answer.json["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


def test_of_very_many_jobs_the_header_names_what_they_begin_with(http: FlaskClient, worker: ScriptedWorker) -> None:
    with worker.serving(lambda job: worker.run(job, ["x"])):
        answer = http.post("/v1/completions", json={"prompt": "a", "n": 65})
    assert len(answer.json["choices"]) == 65
    assert answer.json["id"] == f"cmpl-{answer.headers[HEADER]}"


@every_endpoint
def test_without_a_live_worker_the_answer_is_503_at_once(
    http: FlaskClient, store: JobStore, worker: ScriptedWorker, path: str
) -> None:
    worker.register(capabilities=("completion", "chat", "embeddings"))
    answer = http.post(path, json=BODIES[path])
    assert (answer.status_code, answer.json["error"]["code"]) == (503, "no_worker")
    assert int(answer.headers["Retry-After"]) > 0
    assert list(store.newest()) == []


@every_endpoint
def test_before_any_model_is_known_the_answer_is_503(http: FlaskClient, path: str) -> None:
    answer = http.post(path, json=BODIES[path])
    assert (answer.status_code, answer.json["error"]["code"]) == (503, "no_worker")


def test_a_worker_that_is_busy_is_waited_for(make_app: MakeApp, worker: ScriptedWorker) -> None:
    worker.report()
    http = make_app(ask_timeout_s=0.4).test_client()

    def late(_: Question) -> dict[str, Any]:
        threading.Event().wait(0.6)
        raise InvalidRequest("looked at", "prompt")

    with worker.answering(late):
        answer = http.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json["error"]["message"]) == (400, "looked at")


def test_a_worker_that_does_not_answer_in_time_is_503(
    make_app: MakeApp, store: JobStore, worker: ScriptedWorker
) -> None:
    worker.report()
    answer = make_app(ask_timeout_s=0.05).test_client().post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json["error"]["code"]) == (503, "no_worker")
    assert list(store.newest()) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("chat/completions", CHAT | {"model": "gpt-4o"}, 404, "model_not_found", "model"),
        ("chat/completions", CHAT | {"audio": {}}, 400, "unsupported_field", "audio"),
        ("chat/completions", {"messages": []}, 400, "invalid_request", "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}]}, 400, "invalid_request", None),
        ("completions", {"prompt": ""}, 400, "invalid_request", "prompt"),
        ("completions", {"prompt": [1, 1000]}, 400, "invalid_request", "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 101}, 400, "invalid_request", "max_tokens"),
        (
            "chat/completions",
            CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "unsupported_capability",
            "tools",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_stream_opens(
    make_app: MakeApp,
    store: JobStore,
    worker: ScriptedWorker,
    path: str,
    body: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    http = make_app(max_tokens_cap=100).test_client()
    with worker.live():
        answer = http.post(f"/v1/{path}", json=body | {"stream": stream})
    assert (answer.status_code, answer.content_type) == (status, "application/json")
    assert answer.json["error"]["code"] == code
    assert param is None or answer.json["error"]["param"] == param
    assert list(store.newest()) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_workers_refusal_is_the_answer_with_its_status(
    http: FlaskClient, store: JobStore, worker: ScriptedWorker, stream: bool
) -> None:
    error = ContextLengthExceeded("700 tokens do not fit 512", "messages")

    def refuse(question: Question) -> dict[str, Any]:
        raise error

    worker.report()
    with worker.answering(refuse):
        answer = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert answer.status_code == 400
    assert answer.json == {"error": error.to_dict()}
    assert list(store.newest()) == []


def test_an_embedding_of_a_model_that_gives_none_is_refused(http: FlaskClient, worker: ScriptedWorker) -> None:
    with worker.live():
        answer = http.post("/v1/embeddings", json={"input": "a"})
    assert (answer.status_code, answer.json["error"]["code"]) == (400, "unsupported_capability")


def test_an_answer_of_a_model_that_only_embeds_is_refused(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.register(capabilities=("embeddings",), n_embd=2)
    with worker.live():
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json["error"]["code"]) == (400, "unsupported_capability")
        answer = http.post("/v1/embeddings", json={"input": "a", "dimensions": 3})
        assert (answer.status_code, answer.json["error"]["param"]) == (400, "dimensions")


def test_one_of_each_prompt_that_could_be_refused_is_asked_about(http: FlaskClient, worker: ScriptedWorker) -> None:
    with worker.serving(lambda job: worker.run(job, ["x"])) as asked:
        body = {"prompt": ["short", "b" * 600, "short too", "c" * 600], "n": 2, "seed": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
    assert [question.body["request"]["prompt"][0] for question in asked] == ["b", "c"]


@every_endpoint
def test_a_worker_is_asked_where_it_could_refuse(http: FlaskClient, worker: ScriptedWorker, path: str) -> None:
    worker.register(capabilities=("completion", "chat", "embeddings"), n_embd=2)
    given = base64.b64encode(struct.pack("<2f", 0.6, 0.8)).decode()
    with worker.serving(lambda job: worker.finish(job, "", 0, embedding=given)) as asked:
        assert http.post(path, json=BODIES[path]).status_code == 200
    assert [question.kind for question in asked] == ([] if path == "/v1/completions" else ["check"])


@every_endpoint
def test_bodies_are_held_to_the_rules_of_jobs(make_app: MakeApp, worker: ScriptedWorker, path: str) -> None:
    http = make_app(max_body_bytes=1000).test_client()
    assert http.post(path, data=b'{"input": "a"}', content_type="text/plain").status_code == 415
    assert http.post(path, json={"input": "a" * 1000}).status_code == 413
    for body in (b"", b"[]", b"{", b'{"prompt": "\xff"}'):
        answer = http.post(path, data=body, content_type="application/json")
        assert (answer.status_code, answer.json["error"]["code"]) == (400, "invalid_request"), body


@pytest.mark.parametrize(
    ("error", "status"),
    [(GenerationTimeout("too long"), 504), (GrammarDeadEnd("stuck"), 422), (DecodeFailed("broken"), 500)],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_job_is_answered_with_the_status_of_its_error(
    http: FlaskClient, worker: ScriptedWorker, error: Any, status: int
) -> None:
    with worker.serving(lambda job: worker.fail(job, error)):
        answer = http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == status
    assert answer.json == {"error": error.to_dict()}
    assert answer.headers[HEADER]
    assert (answer.headers.get("X-Should-Retry") == "false") == (not error.retryable)


def test_a_full_queue_is_429_and_leaves_nothing_of_the_call_queued(
    http: FlaskClient, store: JobStore, client: redis.Redis, worker: ScriptedWorker
) -> None:
    worker.register(max_queue=2)
    with worker.live():
        answer = http.post("/v1/completions", json={"prompt": "a", "n": 3})
    assert (answer.status_code, answer.json["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["Retry-After"]) > 0
    assert [record.status for record in store.newest()] == ["cancelled"] * 2
    assert worker.pull_any() == []


def test_requests_are_counted_by_route(http: FlaskClient, worker: ScriptedWorker) -> None:
    with worker.serving(lambda job: worker.run(job, ["x"])):
        http.post("/v1/chat/completions", json=CHAT)
    assert 'route="/v1/chat/completions",status="200"} 1.0' in http.get("/metrics").text
