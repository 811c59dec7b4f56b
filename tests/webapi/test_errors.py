from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient
from redis.exceptions import ExecAbortError, OutOfMemoryError, ReadOnlyError, ResponseError

from shared.errors import QueueFull, SlotlineError, Unavailable, leaves
from shared.http_status import STATUS
from tests.webapi.conftest import MakeApp, ScriptedWorker
from webapi import errors


def test_every_error_of_the_tree_has_exactly_one_status() -> None:
    assert set(STATUS) == set(leaves())
    assert all(400 <= status < 600 for status in STATUS.values())


@pytest.mark.parametrize("cls", leaves(), ids=lambda c: c.__name__)
def test_an_error_is_answered_with_its_status_and_its_code(app: Flask, cls: type[SlotlineError]) -> None:
    error = cls("what happened")
    with app.test_request_context():
        answer = errors.answer(error)
    assert answer.status_code == STATUS[cls]
    assert answer.get_json() == {"error": error.to_dict()}
    assert set(error.to_dict()) == {"message", "type", "code", "param"}


def test_a_full_queue_and_what_is_not_there_say_when_to_come_back(app: Flask) -> None:
    with app.test_request_context():
        assert errors.answer(QueueFull("full", 9)).headers["Retry-After"] == "9"
        assert errors.answer(Unavailable("gone")).headers["Retry-After"] == "5"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "not_found"),
        ("GET", "/v1/jobs/a/b", 404, "not_found"),
        ("GET", "//v1/jobs", 404, "not_found"),
        ("GET", "/v1/jobs/", 404, "not_found"),
        ("GET", "/%ff%00", 404, "not_found"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed"),
        ("POST", "/v1/stats", 405, "method_not_allowed"),
        ("GET", "/v1/jobs/" + "x" * 300, 404, "job_not_found"),
        ("GET", "/v1/jobs/some:dependents", 404, "job_not_found"),
    ],
)
def test_wrong_addresses_and_methods_are_json_errors(
    http: FlaskClient, method: str, path: str, status: int, code: str
) -> None:
    answer = http.open(path, method=method)
    assert answer.status_code == status
    assert answer.content_type == "application/json"
    assert answer.json["error"]["code"] == code
    assert set(answer.json["error"]) == {"message", "type", "code", "param"}


def test_a_wrong_method_is_told_the_right_ones(http: FlaskClient) -> None:
    assert "POST" in http.put("/v1/jobs").headers["Allow"]


def test_options_lists_the_methods(http: FlaskClient) -> None:
    answer = http.options("/v1/jobs")
    assert answer.status_code == 200 and "POST" in answer.headers["Allow"] and answer.data == b""


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_redis_that_is_not_there_is_503_with_retry_after(make_app: MakeApp, method: str) -> None:
    http = make_app(redis_url="redis://127.0.0.1:1").test_client()
    answer = http.open("/v1/jobs", method=method, json={"prompt": "hi"} if method == "POST" else None)
    assert answer.status_code == 503
    assert answer.json["error"]["code"] == "redis_unavailable"
    assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        ReadOnlyError("You can't write against a read only replica."),
        ResponseError("MISCONF Redis is configured to save RDB snapshots, but it is unable to persist to disk."),
        ExecAbortError("Transaction discarded because of: OOM command not allowed"),
        redis.exceptions.MasterDownError("Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
        redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        redis.exceptions.TimeoutError("Timeout reading from socket"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_redis_that_refuses_is_503(app: Flask, error: Exception) -> None:
    app.add_url_rule("/fails", view_func=_raiser(error))
    answer = app.test_client().get("/fails")
    assert answer.status_code == 503
    assert answer.json["error"]["code"] == "redis_unavailable"


def test_a_full_redis_refuses_a_job_and_stores_nothing(
    http: FlaskClient, client: redis.Redis, worker: ScriptedWorker
) -> None:
    client.config_set("maxmemory", 1)
    try:
        answer = http.post("/v1/jobs", json={"prompt": "hi", "id": "mine"})
    finally:
        client.config_set("maxmemory", 0)
    assert answer.status_code == 503
    assert answer.json["error"]["code"] == "redis_unavailable"
    assert http.get("/v1/jobs/mine").status_code == 404


@pytest.mark.parametrize("error", [RuntimeError("secret"), ResponseError("WRONGTYPE secret")], ids=["ours", "redis"])
def test_a_defect_is_a_json_500_without_details(app: Flask, error: Exception) -> None:
    app.add_url_rule("/fails", view_func=_raiser(error))
    answer = app.test_client().get("/fails")
    assert answer.status_code == 500
    assert answer.json["error"]["code"] == "internal_error"
    assert b"secret" not in answer.data and b"Traceback" not in answer.data


def _raiser(error: Exception) -> Callable[[], None]:
    def view() -> None:
        raise error

    return view
