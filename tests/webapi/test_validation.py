from __future__ import annotations

import gzip

import pytest
from flask.testing import FlaskClient

from shared.jobs import JobStore
from tests.webapi.conftest import MakeApp, ScriptedWorker

BAD = [
    (b'{"prompt": "a", "max_token": 5}', "max_token", "did you mean `max_tokens`?"),
    (b'{"prompt": "a", "xyzzy": 5}', "xyzzy", "not a known field"),
    (b'{"prompt": 5}', "prompt", "must be text or a list of at least one token id"),
    (b'{"prompt": []}', "prompt", "at least one token id"),
    (b'{"prompt": ["a"]}', "prompt", "item 0 is wrong"),
    (b'{"prompt": [1, -1]}', "prompt", "item 1 is wrong"),
    (b'{"prompt": [1, 1.5]}', "prompt", "item 1 is wrong"),
    (b'{"prompt": ""}', "prompt", "empty"),
    (b'{"prompt": null}', "prompt", "either `prompt` or `messages`"),
    (b"{}", "prompt", "either `prompt` or `messages`"),
    (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "prompt", "either"),
    (b'{"messages": []}', "messages", "at least 1 item"),
    (b'{"messages": [{"role": "user", "content": ""}]}', "messages.0.content", "is empty"),
    (b'{"messages": [{"role": "user"}]}', "messages.0.content", "`messages.0.content` is empty"),
    (b'{"messages": [{"role": "user", "content": ["a"]}]}', "messages.0.content.0", "must be an object"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens", "greater than or equal to 1"),
    (b'{"prompt": "a", "max_tokens": true}', "max_tokens", "integer"),
    (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens", "integer"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature", "finite"),
    (b'{"prompt": "a", "temperature": -1}', "temperature", "greater than or equal to 0"),
    (b'{"prompt": "a", "temp": "hot"}', "temp", "number"),
    (b'{"prompt": "a", "temp": Infinity}', "temp", "finite"),
    (b'{"prompt": "a", "temp": 1, "temperature": 1}', "temp", "the same field"),
    (b'{"prompt": "a", "top_p": 2}', "top_p", "less than or equal to 1"),
    (b'{"prompt": "a", "top_k": "x"}', "top_k", "integer"),
    (b'{"prompt": "a", "penalty_repeat": 1e9}', "penalty_repeat", "less than or equal to 10"),
    (b'{"prompt": "a", "frequency_penalty": 1e9}', "frequency_penalty", "less than or equal to 2"),
    (b'{"prompt": "a", "seed": -2}', "seed", "greater than or equal to -1"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias", "not a token id"),
    (b'{"prompt": "a", "logit_bias": {"5": NaN}}', "logit_bias.5", "finite"),
    (b'{"prompt": "a", "stop": ""}', "stop", "1 to 512 characters"),
    (b'{"prompt": "a", "stop": ["a", ""]}', "stop", "item 1 is wrong"),
    (b'{"prompt": "a", "grammar": ""}', "grammar", "at least 1 character"),
    (b'{"prompt": "a", "grammar": "root ::= \\"a\\"\\u0000"}', "grammar", "zero character"),
    (b'{"prompt": "a", "priority": "urgent"}', "priority", "'interactive', 'normal' or 'batch'"),
    (b'{"prompt": "a", "timeout_s": 0}', "timeout_s", "greater than 0"),
    (b'{"prompt": "a", "delay_s": 1, "run_at": "2030-01-01T00:00:00Z"}', "delay_s", "not both"),
    (b'{"prompt": "a", "run_at": "2030-01-01T00:00:00"}', "run_at", "time zone"),
    (b'{"prompt": "a", "run_at": "soon"}', "run_at", "soon"),
    (b'{"prompt": "a", "depends_on": ["no such id!"]}', "depends_on", "item 0 is wrong"),
    (b'{"prompt": "a", "depends_on": "nobody"}', "depends_on", "no job 'nobody'"),
    (b'{"prompt": "a", "id": "a/b"}', "id", "pattern"),
    (b'{"prompt": "a", "id": ""}', "id", "pattern"),
    (b'{"prompt": "a", "metadata": {"x": NaN}}', "metadata", "NaN"),
    (b'{"prompt": "a", "metadata": {"x": 1e999}}', "metadata", "Infinity"),
    (b'{"prompt": "a", "metadata": []}', "metadata", "object"),
    (b'{"prompt": "a", "model": "nobody"}', "model", "the models are: tiny"),
    (b'{"prompt": "a", "model": 5}', "model", "string"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD, ids=[body.decode()[:60] for body, _, _ in BAD])
def test_a_bad_value_names_its_field_and_queues_nothing(
    http: FlaskClient, store: JobStore, worker: ScriptedWorker, body: bytes, param: str, says: str
) -> None:
    answer = http.post("/v1/jobs", data=body, content_type="application/json")
    assert answer.status_code == (404 if says.startswith("the models") else 400)
    error = answer.json["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert list(store.newest()) == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"prompt=a", "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON in UTF-8"),
        ('{"prompt": "Käse"}'.encode("latin-1"), "not valid JSON in UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "not valid JSON in UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'["prompt"]', "must be a JSON object"),
        (b'"prompt"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=range(12),
)
def test_a_body_that_is_no_json_object_is_refused(http: FlaskClient, body: bytes, says: str) -> None:
    answer = http.post("/v1/jobs", data=body, content_type="application/json")
    assert answer.status_code == 400
    assert says in answer.json["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_declared_as_json_is_415(http: FlaskClient, kind: str | None) -> None:
    answer = http.post("/v1/jobs", data=b'{"prompt": "a"}', content_type=kind)
    assert answer.status_code == 415
    assert "application/json" in answer.json["error"]["message"]


def test_a_compressed_body_is_415(http: FlaskClient) -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http.post("/v1/jobs", data=body, headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.json["error"]["message"]


def test_a_body_above_the_limit_is_413_naming_it(make_app: MakeApp) -> None:
    http = make_app(max_body_bytes=1000).test_client()
    answer = http.post("/v1/jobs", json={"prompt": "a" * 1000})
    assert answer.status_code == 413
    assert answer.json["error"]["code"] == "body_too_large"
    assert "1000 bytes" in answer.json["error"]["message"]
    assert http.post("/v1/jobs", json={"prompt": "a" * 900}).status_code == 202


def test_the_workers_spellings_and_empty_stops_are_accepted(http: FlaskClient) -> None:
    body = {"prompt": "a", "temp": 0.5, "penalty_repeat": 1.1, "penalty_freq": 1, "penalty_present": 1}
    assert http.post("/v1/jobs", json=body | {"stop": []}).status_code == 202
    assert http.post("/v1/jobs", json=body | {"stop": None}).status_code == 202


def test_a_prompt_with_a_zero_character_is_kept_whole(http: FlaskClient, worker: ScriptedWorker) -> None:
    prompt = "before\0after \u2028 \U0001f600"
    assert http.post("/v1/jobs", json={"prompt": prompt}).status_code == 202
    _function, args, _ = worker.pull().record.arguments()
    assert args[0]["prompt"] == prompt


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/jobs?wait=-1", "wait"),
        ("/v1/jobs?wait=NaN", "wait"),
        ("/v1/jobs?wait=soon", "wait"),
        ("/v1/jobs?wait=1e9", "wait"),
        ("/v1/jobs?wat=1", "wat"),
    ],
)
def test_a_bad_query_is_refused_and_queues_nothing(http: FlaskClient, store: JobStore, path: str, param: str) -> None:
    answer = http.post(path, json={"prompt": "a"})
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == param
    assert list(store.newest()) == []
