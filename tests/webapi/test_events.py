from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient
from rq import Queue
from rq.job import Job

from shared.names import SERIALIZER, events_key, job_key, queue_name
from tests.webapi.conftest import MODEL, MakeApp, ScriptedWorker
from tests.webapi.sse import Frame, events, frames
from webapi import subscription
from webapi.services import services_of
from webapi.streams import Hub

AWKWARD = ["one\n\n", "two\r\nthree\r", "\u2028 \u2029 \x85", "```\ncode\n```\n", "data: x\n\n", "\U0001f600\0", ""]


@pytest.fixture
def job(http: FlaskClient, worker: ScriptedWorker) -> str:
    """Id of a job that waits."""
    found: str = http.post("/v1/jobs", json={"prompt": "hi"}).json["id"]
    return found


def follow(http: FlaskClient, job_id: str, query: str = "", **headers: str) -> Iterator[Frame]:
    answer = http.get(f"/v1/jobs/{job_id}/events{query}", headers=headers)
    assert answer.status_code == 200, answer.json
    return (frame for frame in events(answer.iter_encoded()) if frame.event != "queued")


def text_of(found: list[Frame]) -> str:
    return "".join(frame.json()["text"] for frame in found if frame.event == "token")


def test_the_headers_keep_proxies_from_holding_a_stream_back(http: FlaskClient, job: str) -> None:
    with http.get(f"/v1/jobs/{job}/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["Cache-Control"] == "no-cache, no-transform"
        assert answer.headers["X-Accel-Buffering"] == "no"
        blocks = frames(answer.iter_encoded())
        assert next(blocks) == Frame(retry="1000")
        assert next(blocks).comment is not None


def test_a_silent_stream_gets_comments(http: FlaskClient, job: str) -> None:
    with http.get(f"/v1/jobs/{job}/events") as answer:
        blocks = frames(answer.iter_encoded())
        found = [next(blocks) for _ in range(5)]
    assert [block.event or block.comment for block in found[2:]] == ["queued", "keep-alive", "keep-alive"]


def test_a_live_stream_gives_every_event_as_it_happens(http: FlaskClient, worker: ScriptedWorker, job: str) -> None:
    stream = follow(http, job)
    pulled = worker.pull()
    worker.started(pulled)
    assert next(stream) == Frame("started", None, '{"prompt_tokens":3,"tokens":0}')
    worker.token(pulled, 0, "a")
    assert next(stream) == Frame("token", "0", '{"index":0,"text":"a","token":7}')
    worker.token(pulled, 1, "b")
    assert next(stream).id == "1"
    final = worker.finish(pulled, "ab", 2)
    done = next(stream)
    assert (done.event, done.id, done.json()) == ("done", "end", final)
    assert done.json() == http.get(f"/v1/jobs/{job}").json
    assert list(stream) == []


def test_a_late_reader_gets_everything_from_the_start_once(http: FlaskClient, worker: ScriptedWorker, job: str) -> None:
    pulled = worker.pull()
    worker.started(pulled)
    for index in range(5):
        worker.token(pulled, index, str(index))
    stream = follow(http, job)
    found = [next(stream) for _ in range(6)]
    worker.token(pulled, 5, "5")
    worker.finish(pulled, "012345", 6)
    found += stream
    assert [frame.id for frame in found] == [None, "0", "1", "2", "3", "4", "5", "end"]
    assert text_of(found) == "012345"


def test_a_reader_after_the_end_gets_it_all_at_once(http: FlaskClient, worker: ScriptedWorker, job: str) -> None:
    final = worker.run_all(["a", "b"])
    found = list(follow(http, job))
    assert [frame.event for frame in found] == ["started", "token", "token", "done"]
    assert found[-1].json() == final


def test_two_readers_at_once_each_get_everything(http: FlaskClient, worker: ScriptedWorker, job: str) -> None:
    first, second = follow(http, job), follow(http.application.test_client(), job)
    pulled = worker.pull()
    worker.started(pulled)
    assert next(first).event == next(second).event == "started"
    worker.token(pulled, 0, "a")
    worker.finish(pulled, "a", 1)
    assert [f.id for f in first] == [f.id for f in second] == ["0", "end"]


@pytest.mark.parametrize("by_header", [True, False])
@pytest.mark.parametrize("after", [-1, 0, 2, 3])
def test_a_returning_reader_goes_on_after_its_last_token(
    http: FlaskClient, worker: ScriptedWorker, job: str, after: int, by_header: bool
) -> None:
    worker.run_all(["a", "b", "c", "d"])
    query, headers = ("", {"Last-Event-ID": str(after)}) if by_header else (f"?after={after}", {})
    found = list(follow(http, job, query, **headers))
    assert text_of(found) == "abcd"[after + 1 :]
    assert found[-1].event == "done"


def test_a_reconnecting_browser_repeats_its_address_and_is_not_sent_back(
    http: FlaskClient, worker: ScriptedWorker, job: str
) -> None:
    worker.run_all(["a", "b", "c", "d"])
    assert text_of(list(follow(http, job, "?after=0", **{"Last-Event-ID": "2"}))) == "d"
    assert text_of(list(follow(http, job, "?after=2", **{"Last-Event-ID": "0"}))) == "d"


def test_a_reader_that_claims_more_than_there_is_still_gets_the_end(
    http: FlaskClient, worker: ScriptedWorker, job: str
) -> None:
    stream = follow(http, job, "?after=50")
    worker.run_all(["a"])
    assert [frame.event for frame in stream] == ["done"]
    assert [frame.event for frame in follow(http, job, "?after=50")] == ["done"]


@pytest.mark.parametrize("query", ["", "?after=0"])
def test_a_reader_that_has_the_end_gets_204(http: FlaskClient, worker: ScriptedWorker, job: str, query: str) -> None:
    worker.run_all(["a"])
    answer = http.get(f"/v1/jobs/{job}/events{query}", headers={"Last-Event-ID": "end"})
    assert (answer.status_code, answer.data) == (204, b"")
    assert http.get(f"/v1/jobs/{job}/events?after=end").status_code == 204


@pytest.mark.parametrize("value", ["x", "-2", "1.5", " 1", "1_0", "9" * 30, "١"])
def test_a_bad_place_is_refused(http: FlaskClient, job: str, value: str) -> None:
    answer = http.get(f"/v1/jobs/{job}/events", query_string={"after": value})
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "after"


def test_a_bad_last_event_id_is_refused(http: FlaskClient, job: str) -> None:
    answer = http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "first"})
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "Last-Event-ID"


def test_no_text_breaks_a_frame(http: FlaskClient, worker: ScriptedWorker, job: str) -> None:
    worker.run_all(AWKWARD)
    found = list(follow(http, job))
    assert text_of(found) == "".join(AWKWARD) == found[-1].json()["text"]


def test_a_failed_job_ends_with_failed_and_its_partial_text(
    http: FlaskClient, worker: ScriptedWorker, job: str
) -> None:
    stream = follow(http, job)
    pulled = worker.pull()
    worker.started(pulled)
    worker.token(pulled, 0, "part")
    error = {"message": "took too long", "type": "generation_error", "code": "timeout", "param": None}
    worker.finish(pulled, "part", 1, status="failed", finish_reason="timeout", error=error)
    end = list(stream)[-1]
    assert (end.event, end.id, end.json()["error"], end.json()["text"]) == ("failed", "end", error, "part")


def test_an_interrupted_job_goes_on_with_resumed_and_no_token_twice(
    http: FlaskClient, worker: ScriptedWorker, job: str
) -> None:
    stream = follow(http, job)
    pulled = worker.pull()
    worker.started(pulled)
    worker.token(pulled, 0, "a")
    worker.store.hand_back(worker.name, [(job, pulled.execution)])
    again = worker.pull()
    worker.started(again, tokens=1)
    worker.token(again, 0, "a")  # written again after a lost reply
    worker.token(again, 1, "b")
    worker.finish(again, "ab", 2)
    found = list(stream)
    assert [frame.event for frame in found] == ["started", "token", "resumed", "token", "done"]
    assert text_of(found) == "ab"


def test_cancelling_a_waiting_job_ends_its_stream(http: FlaskClient, job: str) -> None:
    stream = follow(http, job)
    http.post(f"/v1/jobs/{job}/cancel")
    (end,) = stream
    assert (end.event, end.json()["status"]) == ("done", "cancelled")


def _rq_job(client: redis.Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=client, serializer=SERIALIZER)


def test_a_job_cancelled_by_rqs_own_tools_ends_its_stream(http: FlaskClient, client: redis.Redis, job: str) -> None:
    stream = follow(http, job)
    _rq_job(client, job).cancel()
    (end,) = stream
    assert (end.event, end.id, end.json()["status"]) == ("done", "end", "cancelled")
    (late,) = follow(http, job)
    assert (late.event, late.json()["status"]) == ("done", "cancelled")


@pytest.mark.parametrize("how", ["delete", "empty", "erase"])
def test_a_removed_job_ends_its_stream_with_failed(
    http: FlaskClient, client: redis.Redis, job: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webapi.follow.REWRITE_S", 0.0)
    answer = http.get(f"/v1/jobs/{job}/events")
    blocks = frames(answer.iter_encoded())
    for _ in range(3):  # the reader has found the job waiting
        next(blocks)
    if how == "delete":
        _rq_job(client, job).delete()
    elif how == "empty":
        Queue(queue_name(MODEL, "normal"), connection=client, serializer=SERIALIZER).empty()
    else:
        client.delete(job_key(job), events_key(job))
    *_, end = (block for block in blocks if block.event)
    assert (end.event, end.id, end.json()["error"]["code"]) == ("failed", "end", "job_removed")
    assert http.get(f"/v1/jobs/{job}/events").status_code == 404


@pytest.mark.parametrize("query", ["", "?after=0", "?after=2"])
def test_an_ended_job_whose_log_has_expired_gives_its_text_and_its_end(
    http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, job: str, query: str
) -> None:
    final = worker.run_all(["a", "b", "c", "d"])
    worker.record(final)
    client.delete(events_key(job))
    gap, end = follow(http, job, query)
    assert (gap.event, gap.id) == ("gap", "3")
    assert gap.json() == {"tokens": 4, "text": "abcd", "reasoning_content": None, "tool_calls": None}
    assert (end.event, end.id, end.json()) == ("done", "end", final)
    assert http.get(f"/v1/jobs/{job}").json == final
    assert [frame.event for frame in follow(http, job, "", **{"Last-Event-ID": gap.id or ""})][-1] == "done"


def test_a_log_that_has_lost_its_head_gives_the_whole_text_instead(
    http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, job: str
) -> None:
    worker.run_all(["a", "b", "c", "d"])
    client.xtrim(events_key(job), minid="3-0", approximate=False)
    assert [frame.event for frame in follow(http, job)] == ["gap", "done"]
    assert [frame.event for frame in follow(http, job, "?after=0")] == ["gap", "done"]
    assert [frame.id for frame in follow(http, job, "?after=1")] == ["2", "3", "end"]


def test_a_reader_of_a_running_job_gets_a_gap_for_what_nobody_has_any_more(
    http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webapi.follow.REWRITE_S", 0.0)
    pulled = worker.pull()
    worker.started(pulled)
    for index, text in enumerate("abcd"):
        worker.token(pulled, index, text)
    client.xtrim(events_key(job), minid="3-0", approximate=False)
    stream = follow(http, job)
    found = [next(stream) for _ in range(3)]
    assert [(frame.event, frame.id) for frame in found] == [("gap", "1"), ("token", "2"), ("token", "3")]
    assert found[0].json()["text"] is None
    worker.finish(pulled, "abcd", 4)
    (end,) = stream
    assert end.json()["text"] == "abcd"


def test_a_reader_hears_how_many_jobs_are_ahead(http: FlaskClient, worker: ScriptedWorker, job: str) -> None:
    worker.report(idle_slots=0, job_s=8.0)
    later = http.post("/v1/jobs", json={"prompt": "hi"}).json["id"]
    with http.get(f"/v1/jobs/{later}/events") as answer:
        first = next(events(answer.iter_encoded()))
    assert (first.event, first.id, first.json()) == ("queued", None, {"ahead": 1, "estimate_s": 4.0})


def test_a_lost_subscription_leaves_no_gap(
    http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, job: str
) -> None:
    stream = follow(http, job)
    pulled = worker.pull()
    worker.started(pulled)
    worker.token(pulled, 0, "a")
    assert [next(stream).event for _ in range(2)] == ["started", "token"]
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    for index, text in enumerate("bcd", 1):
        worker.token(pulled, index, text)
    worker.finish(pulled, "abcd", 4)
    found = list(stream)
    assert [frame.id for frame in found] == ["1", "2", "3", "end"]


def test_a_subscription_that_redis_cuts_off_for_being_slow_leaves_no_gap(
    http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()
    reading.set()
    dispatch = Hub._dispatch

    def slowly(hub: Hub, channel: str, data: bytes) -> bool:
        reading.wait()
        return dispatch(hub, channel, data)

    monkeypatch.setattr(Hub, "_dispatch", slowly)
    stream = follow(http, job)
    pulled = worker.pull()
    worker.started(pulled)
    assert next(stream).event == "started"
    limits = client.config_get("client-output-buffer-limit")
    client.config_set("client-output-buffer-limit", "pubsub 32768 8192 1")
    reading.clear()
    count, text = 0, "x" * 50_000
    try:
        while client.client_list(_type="pubsub") and count < 1000:
            worker.token(pulled, count, text)
            count += 1
    finally:
        reading.set()
        client.config_set("client-output-buffer-limit", limits["client-output-buffer-limit"])
    assert count < 1000, "Redis has not cut it off"
    worker.token(pulled, count, "end")
    final = worker.finish(pulled, text * count + "end", count + 1)
    found = list(stream)
    assert [frame.id for frame in found] == [*map(str, range(count + 1)), "end"]
    assert text_of(found) == final["text"]


def test_a_reader_that_falls_far_behind_still_gets_everything_once(
    http: FlaskClient, worker: ScriptedWorker, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "QUEUE_LIMIT", 10)
    stream = follow(http, job)
    pulled = worker.pull()
    worker.started(pulled)
    assert next(stream).event == "started"
    for index in range(200):
        worker.token(pulled, index, "x")
    worker.finish(pulled, "x" * 200, 200)
    assert [frame.id for frame in stream] == [*map(str, range(200)), "end"]


def test_readers_that_join_at_any_moment_get_everything_once(app: Flask, worker: ScriptedWorker, job: str) -> None:
    pulled = worker.pull()
    found: list[list[str | None]] = []

    def read() -> None:
        found.append([frame.id for frame in follow(app.test_client(), job)])

    threads = [threading.Thread(target=read) for _ in range(10)]
    for index in range(300):
        if index % 30 == 0:
            threads[index // 30].start()
        worker.token(pulled, index, "x")
    worker.finish(pulled, "x" * 300, 300)
    for thread in threads:
        thread.join()
    assert found == [[*map(str, range(300)), "end"]] * 10


def test_a_closed_reader_is_forgotten(app: Flask, http: FlaskClient, job: str) -> None:
    hub = services_of(app).hub
    stream = http.get(f"/v1/jobs/{job}/events")
    assert hub.open_streams == 1
    stream.close()
    assert hub.open_streams == 0


def test_streams_beyond_the_limit_are_refused_until_one_closes(make_app: MakeApp, job: str) -> None:
    http = make_app(max_streams=2).test_client()
    path = f"/v1/jobs/{job}/events"
    first, second = http.get(path), http.get(path)
    refused = http.get(path)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert "2 streams" in refused.json["error"]["message"]
    first.close()
    third = http.get(path)
    assert third.status_code == 200
    second.close()
    third.close()


def test_head_gives_the_headers_and_opens_no_stream(app: Flask, http: FlaskClient, job: str) -> None:
    answer = http.head(f"/v1/jobs/{job}/events")
    assert (answer.status_code, answer.content_type, answer.data) == (200, "text/event-stream", b"")
    assert services_of(app).hub.open_streams == 0
    assert http.head("/v1/jobs/nobody/events").status_code == 404


def test_the_channel_carries_the_very_events_of_the_stream(
    http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, job: str
) -> None:
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(events_key(job))
        channel.get_message(timeout=5)
        worker.run_all(["a", "\u2028"])
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["event"] != "done":
            got = channel.get_message(timeout=5)
            if got is not None:
                messages.append(json.loads(got["data"]))
    found = list(follow(http, job))
    assert [(m["event"], m["data"]) for m in messages] == [(f.event, f.json()) for f in found]
