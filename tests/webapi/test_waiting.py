from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient
from redis.client import PubSub

from shared.names import events_key
from tests.webapi.conftest import ScriptedWorker
from tests.webapi.sse import Frame, events
from webapi.services import services_of


@pytest.fixture
def channel(client: redis.Redis) -> Iterator[PubSub]:
    """All channels of jobs."""
    with client.pubsub(ignore_subscribe_messages=True) as found:
        found.psubscribe(events_key("*"))
        found.get_message(timeout=5)
        yield found


def submit(http: FlaskClient) -> str:
    found: str = http.post("/v1/jobs", json={"prompt": "hi"}).json["id"]
    return found


def first_event(http: FlaskClient, job_id: str) -> Frame:
    with http.get(f"/v1/jobs/{job_id}/events") as answer:
        return next(events(answer.iter_encoded()))


def test_who_listens_in_redis_hears_the_same_as_a_reader(
    http: FlaskClient, worker: ScriptedWorker, channel: PubSub
) -> None:
    job = submit(http)
    frame = first_event(http, job)
    message = channel.get_message(timeout=5)
    assert message["channel"] == events_key(job).encode()
    assert message["data"] == f'{{"event":"queued","id":"0-0","data":{frame.data}}}'.encode()


def test_each_round_tells_of_the_jobs_that_still_wait(
    app: Flask, http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, channel: PubSub
) -> None:
    waiting = services_of(app).waiting
    worker.report(job_s=2.0, idle_slots=0)
    jobs = [submit(http) for _ in range(3)]
    streams = [http.application.test_client().get(f"/v1/jobs/{job}/events") for job in jobs]
    for _ in jobs:
        assert channel.get_message(timeout=5)
    worker.pull()
    client.delete(*(f"slotline:told:{job}" for job in jobs))
    waiting._tick()
    told = [channel.get_message(timeout=5) for _ in jobs[1:]]
    assert [m["channel"].decode() for m in told] == [events_key(job) for job in jobs[1:]]
    assert [b'"ahead":%d' % ahead in m["data"] for ahead, m in enumerate(told)] == [True, True]
    for stream in streams:
        stream.close()
    client.delete(*(f"slotline:told:{job}" for job in jobs))
    waiting._tick()
    assert channel.get_message(timeout=0.1) is None


def test_a_job_that_does_not_wait_any_more_is_told_of_to_nobody(
    http: FlaskClient, worker: ScriptedWorker, channel: PubSub
) -> None:
    job = submit(http)
    pulled = worker.pull()
    worker.started(pulled)
    assert first_event(http, job).event == "started"
    worker.finish(pulled, "", 0)
    assert first_event(http, job).event == "started"
    heard = [channel.get_message(timeout=5)["data"] for _ in range(2)]
    assert not any(b"queued" in data[:20] for data in heard)


def test_redis_away_costs_no_more_than_the_news(
    app: Flask, http: FlaskClient, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise redis.ConnectionError("gone")

    job = submit(http)
    monkeypatch.setattr(services_of(app).store.ahead, "tell", fail)
    with http.get(f"/v1/jobs/{job}/events") as answer:
        stream = events(answer.iter_encoded())
        worker.run_all(["a"])
        assert [frame.event for frame in stream] == ["started", "token", "done"]
