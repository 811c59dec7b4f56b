from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from shared.ask import Question
from shared.errors import InvalidRequest
from tests.webapi.conftest import MakeApp, ScriptedWorker


def reply(question: Question) -> dict[str, Any]:
    if question.kind == "tokenize":
        return {"tokens": list(question.body["content"].encode())}
    return {"content": bytes(question.body["tokens"]).decode()}


def test_text_becomes_tokens_and_back(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.report()
    with worker.answering(reply) as asked:
        tokens = http.post("/v1/tokenize", json={"content": "hi\0", "parse_special": True})
        text = http.post("/v1/detokenize", json={"tokens": [104, 105], "model": "tiny"})
    assert (tokens.status_code, tokens.json) == (200, {"tokens": [104, 105, 0]})
    assert (text.status_code, text.json) == (200, {"content": "hi"})
    assert [(q.kind, q.body) for q in asked] == [
        ("tokenize", {"content": "hi\0", "add_special": False, "parse_special": True}),
        ("detokenize", {"tokens": [104, 105]}),
    ]


@pytest.mark.parametrize(("path", "body"), [("/v1/tokenize", {"content": "hi"}), ("/v1/detokenize", {"tokens": [1]})])
def test_without_a_live_worker_it_is_503_no_worker(
    http: FlaskClient, no_worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    for _ in range(2):
        answer = http.post(path, json=body)
        assert answer.status_code == 503
        assert answer.json["error"]["code"] == "no_worker"
        assert int(answer.headers["Retry-After"]) > 0
        no_worker.register()


def test_a_worker_that_does_not_answer_is_503(make_app: MakeApp, worker: ScriptedWorker) -> None:
    worker.report()
    answer = make_app(ask_timeout_s=0.05).test_client().post("/v1/tokenize", json={"content": "hi"})
    assert answer.status_code == 503
    assert answer.json["error"]["code"] == "no_worker"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tokenize", {}, "content"),
        ("/v1/tokenize", {"content": 5}, "content"),
        ("/v1/tokenize", {"content": "a", "add_specials": True}, "add_specials"),
        ("/v1/detokenize", {"tokens": "5"}, "tokens"),
        ("/v1/detokenize", {"tokens": [1, "x"]}, "tokens.1"),
        ("/v1/detokenize", {"tokens": [1, -1]}, "tokens.1"),
        ("/v1/detokenize", {"tokens": [1, 1000]}, "tokens"),
    ],
)
def test_bad_input_names_its_field(
    http: FlaskClient, worker: ScriptedWorker, path: str, body: dict[str, Any], param: str
) -> None:
    worker.report()
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == param


def test_an_unknown_model_is_404(http: FlaskClient, worker: ScriptedWorker) -> None:
    assert http.post("/v1/tokenize", json={"content": "a", "model": "gpt"}).status_code == 404


def test_the_workers_own_refusal_is_passed_on(http: FlaskClient, worker: ScriptedWorker) -> None:
    def refuse(question: Question) -> dict[str, Any]:
        raise InvalidRequest("too long", "content")

    worker.report()
    with worker.answering(refuse):
        answer = http.post("/v1/tokenize", json={"content": "a"})
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "content"
