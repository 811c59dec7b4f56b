"""Calls are bound to their caller's connection, and free everything when they end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.jobs import JobStore
from shared.names import queue_name, rq_queue_key, web_lease_key
from shared.records import JobRecord
from tests.processes import eventually
from tests.webapi.conftest import MakeApp, ScriptedWorker
from webapi.services import CONNECTIONS, services_of

BODY: dict[str, Any] = {"prompt": "hi", "n": 2}


@pytest.fixture
def live(worker: ScriptedWorker) -> Iterator[ScriptedWorker]:
    with worker.live():
        yield worker


class Caller:
    """A call on a connection that the test can close; `status` is there once it has been answered."""

    def __init__(self, http: FlaskClient, body: dict[str, Any], connection: socket.socket) -> None:
        self.status: int | None = None
        self.data = b""
        self._http, self._body, self._connection = http, body, connection
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def _call(self) -> None:
        with self._http.post(
            "/v1/completions", json=self._body, environ_overrides={"gunicorn.socket": self._connection}
        ) as answer:
            for chunk in answer.iter_encoded():
                self.data += chunk
            self.status = answer.status_code

    def join(self) -> None:
        self._thread.join(timeout=10)
        assert self.status is not None


@contextmanager
def calling(app: Flask, **fields: Any) -> Iterator[tuple[Caller, socket.socket]]:
    """A call, and the caller's end of its connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        caller = Caller(app.test_client(), BODY | fields, ours)
        yield caller, theirs
        theirs.close()
        caller.join()


def jobs(store: JobStore, count: int = 2) -> list[JobRecord]:
    """The jobs of the call, once they are queued."""

    def found() -> list[JobRecord]:
        records = list(store.newest())
        return records if len(records) == count else []

    return eventually(found, "the jobs are queued")


def states(store: JobStore) -> list[str]:
    return sorted("cancelling" if r.cancelling and not r.is_over else r.status for r in store.newest())


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_caller_that_leaves_while_its_jobs_are_queued_cancels_them(
    app: Flask, store: JobStore, live: ScriptedWorker, stream: bool
) -> None:
    with calling(app, stream=stream) as (caller, connection):
        jobs(store)
        connection.close()
        caller.join()
    assert states(store) == ["cancelled"] * 2
    assert live.pull_any() == []
    assert b"[DONE]" not in caller.data and b"error" not in caller.data


@pytest.mark.parametrize("tokens", [0, 3], ids=["prefilling", "generating"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_caller_that_leaves_while_its_jobs_run_cancels_them(
    app: Flask, store: JobStore, live: ScriptedWorker, stream: bool, tokens: int
) -> None:
    with calling(app, stream=stream) as (caller, connection):
        running = live.pull_next()
        live.started(running)
        for index in range(tokens):
            live.token(running, index, "x")
        jobs(store)
        connection.close()
        caller.join()
    assert store.fetch(running.record.id).cancelling
    assert states(store) == ["cancelled", "cancelling"]


def test_a_caller_that_left_before_its_jobs_were_queued_queues_none(
    app: Flask, store: JobStore, live: ScriptedWorker
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        Caller(app.test_client(), BODY, ours).join()
    assert list(store.newest()) == []


def test_jobs_in_the_background_are_queued_for_a_caller_that_does_not_wait_at_all(
    app: Flask, store: JobStore, live: ScriptedWorker
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        Caller(app.test_client(), BODY | {"background": True}, ours).join()
    assert states(store) == ["queued"] * 2


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_jobs_in_the_background_go_on_without_their_caller(
    app: Flask, store: JobStore, live: ScriptedWorker, stream: bool
) -> None:
    with calling(app, stream=stream, background=True) as (caller, connection):
        assert [record.bound for record in jobs(store)] == [None, None]
        connection.close()
        caller.join()
    assert states(store) == ["queued"] * 2
    assert services_of(app).hub.open_streams == 0


def test_jobs_in_the_background_are_queued_without_a_worker_and_answered_once_there_is_one(
    app: Flask, store: JobStore, no_worker: ScriptedWorker
) -> None:
    with calling(app, background=True) as (caller, _):
        assert [record.model for record in jobs(store)] == ["default"] * 2
        no_worker.run_all(["a"])
        no_worker.run_all(["b"])
        caller.join()
        assert caller.status == 200


def test_a_bound_job_names_this_process_whose_lease_is_there_first(
    app: Flask, store: JobStore, client: redis.Redis, live: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = services_of(app).bound.id
    leased: list[Any] = []
    submit = services_of(app).store.submit_many

    def note(*args: Any, **fields: Any) -> Any:
        leased.append(client.get(web_lease_key(web)))
        return submit(*args, **fields)

    monkeypatch.setattr(services_of(app).store, "submit_many", note)
    with calling(app):
        assert [record.bound for record in jobs(store)] == [web] * 2
    assert leased == [b"1"]


def test_the_lease_does_not_wait_for_the_connections_of_the_calls(app: Flask, client: redis.Redis) -> None:
    given = services_of(app)
    pool: Any = given.client.connection_pool
    taken = [pool.get_connection() for _ in range(CONNECTIONS)]
    given.bound.enter()
    assert client.get(web_lease_key(given.bound.id)) == b"1"
    given.bound.leave()
    for connection in taken:
        pool.release(connection)


def test_a_call_of_very_many_jobs_queues_and_cancels_all_of_them(
    http: FlaskClient, store: JobStore, live: ScriptedWorker
) -> None:
    answer = http.post("/v1/completions", json={"prompt": ["a"] * 150, "stream": True})
    call = answer.headers["X-Slotline-Job-Id"]
    waiting = store.client.lrange(rq_queue_key(queue_name("tiny", "interactive")), 0, -1)
    assert waiting == [f"{call}-{n}".encode() for n in range(150)]
    answer.close()
    assert states(store) == ["cancelled"] * 150


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_call_that_ends_leaves_nothing_open(app: Flask, store: JobStore, live: ScriptedWorker, stream: bool) -> None:
    given = services_of(app)
    with calling(app, stream=stream) as (caller, _):
        jobs(store)
        assert given.hub.open_streams == 1  # one caller, however many jobs
        live.run_all(["a"])
        live.run_all(["b"])
        caller.join()
        assert caller.status == 200
        assert given.hub.open_streams == 0
    assert states(store) == ["completed"] * 2


def test_a_reader_that_closes_its_stream_cancels_the_jobs(
    app: Flask, http: FlaskClient, store: JobStore, live: ScriptedWorker
) -> None:
    answer = http.post("/v1/completions", json=BODY | {"stream": True})
    assert states(store) == ["queued"] * 2
    answer.close()  # as a write that fails does
    assert states(store) == ["cancelled"] * 2
    assert services_of(app).hub.open_streams == 0


def test_a_submit_whose_reply_is_lost_leaves_no_job_behind(
    app: Flask, http: FlaskClient, store: JobStore, live: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = services_of(app).store
    submit = ours.submit_many

    def lose_reply(*args: Any, **fields: Any) -> None:
        submit(*args, **fields)
        raise RedisConnectionError("gone")

    monkeypatch.setattr(ours, "submit_many", lose_reply)
    answer = http.post("/v1/completions", json={"prompt": "hi"})
    assert (answer.status_code, answer.json["error"]["code"]) == (503, "redis_unavailable")
    assert states(store) == ["cancelled"]


def test_calls_count_as_streams_and_are_refused_beyond_the_limit(
    make_app: MakeApp, store: JobStore, live: ScriptedWorker
) -> None:
    app = make_app(max_streams=1)
    with calling(app):
        jobs(store)
        refused = app.test_client().post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert "1 streams" in refused.json["error"]["message"]
    assert states(store) == ["cancelled"] * 2


def test_a_stopping_server_answers_a_plain_call_and_cancels_its_jobs(
    app: Flask, store: JobStore, live: ScriptedWorker
) -> None:
    with calling(app) as (caller, _):
        jobs(store)
        services_of(app).hub.close()
        caller.join()
        assert caller.status == 503
    assert states(store) == ["cancelled"] * 2
