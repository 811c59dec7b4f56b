"""Streamed answers, frame by frame."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from shared.errors import GenerationTimeout
from shared.jobs import JobStore
from shared.names import events_key
from shared.openai.chat import read_chat
from shared.openai.completions import CompletionExchange, read_completion
from shared.openai.exchange import Call, Exchange
from shared.stream import PROGRESS, UNLOGGED, Event, EventId, dumps, token_data
from tests.webapi.conftest import MODEL, ScriptedWorker
from tests.webapi.sse import Frame, frames
from tests.webapi.test_events import AWKWARD
from webapi.chunks import PLAIN_TOKEN, Chunks
from webapi.services import services_of
from webapi.sse import KEEP_ALIVE

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
PLAIN: dict[str, Any] = {"prompt": "hi", "stream": True}


@pytest.fixture
def live(worker: ScriptedWorker) -> Iterator[ScriptedWorker]:
    with worker.live():
        yield worker


def stream(http: FlaskClient, path: str, body: dict[str, Any]) -> Iterator[Frame]:
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.json
    return frames(answer.iter_encoded())


def data(blocks: Iterator[Frame]) -> list[Any]:
    """What the frames of a whole stream carry, comments left out; `[DONE]` as text."""
    found = [block for block in blocks if block.comment is None]
    assert all(block.event is block.id is block.retry is None for block in found)
    return [block.data if block.data == "[DONE]" else block.json() for block in found]


def texts(chunks: list[Any], choice: int = 0) -> str:
    """The joined text of one choice."""
    found = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"] if c["index"] == choice]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in found)


def test_the_headers_keep_proxies_from_holding_a_stream_back(http: FlaskClient, live: ScriptedWorker) -> None:
    with http.post("/v1/completions", json=PLAIN) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["Cache-Control"] == "no-cache, no-transform"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert next(frames(answer.iter_encoded())).comment == "connected"


def test_a_chat_streams_its_role_each_token_its_end_and_done(http: FlaskClient, live: ScriptedWorker) -> None:
    blocks = stream(http, "chat/completions", CHAT)
    assert next(blocks).comment == "connected"
    assert next(blocks).json()["choices"][0]["delta"]["role"] == "assistant"  # before the job has a slot
    job = live.pull()
    live.started(job)
    live.token(job, 0, "a")
    assert next(blocks).json()["choices"][0]["delta"] == {"content": "a"}
    live.token(job, 1, "")  # part of a character
    live.token(job, 2, "b")
    assert next(blocks).json()["choices"][0]["delta"] == {"content": "b"}
    live.finish(job, "ab", 3)
    end, done = blocks
    assert end.json()["choices"][0]["finish_reason"] == "length"
    assert end.json()["model"] == MODEL
    assert done.data == "[DONE]"


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", PLAIN)])
def test_no_text_breaks_a_frame(http: FlaskClient, live: ScriptedWorker, path: str, body: dict[str, Any]) -> None:
    blocks = stream(http, path, body)
    live.run_all(AWKWARD)
    found = data(blocks)
    assert texts(found) == "".join(AWKWARD)
    assert found.count("[DONE]") == 1 and found[-1] == "[DONE]"


@pytest.mark.parametrize("text", [*AWKWARD, '"}', '","token":5}', "\\", "\\u0000", "\ud800"])
@pytest.mark.parametrize("reader", [read_chat, read_completion])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_plain_token_becomes_the_chunk_that_the_endpoint_makes(
    reader: Callable[[dict[str, Any]], Exchange], text: str, include_usage: bool
) -> None:
    prompt = {"prompt": "hi"} if reader is read_completion else {"messages": CHAT["messages"]}
    exchange = reader(prompt | {"stream": True, "stream_options": {"include_usage": include_usage}, "n": 2})
    call: Any = SimpleNamespace(exchange=exchange, about=Call("id", 7, "model"), finals={})
    data = token_data(3, text, 9)
    assert PLAIN_TOKEN.fullmatch(data)
    chunk = exchange.chunk(call.about, 1, json.loads(data))
    wanted = b"" if chunk is None else b"data: " + dumps(chunk).encode() + b"\n\n"
    assert Chunks(call).frames([(1, Event(EventId.of_token(3), "token", data))]) == wanted


def test_a_part_that_is_lost_ends_the_stream_with_an_error(
    http: FlaskClient, live: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webapi.follow.REWRITE_S", 0.0)
    blocks = stream(http, "completions", PLAIN)
    job = live.pull()
    live.token(job, 0, "a")
    assert texts([next(block for block in blocks if block.data).json()]) == "a"
    message = {"event": "token", "id": "4-0", "data": {"index": 3, "text": "d", "token": 9}}
    live.store.client.publish(events_key(job.record.id), dumps(message))
    *_, last = data(blocks)
    assert last["error"]["code"] == "internal_error"


def test_progress_keeps_a_stream_from_being_silent() -> None:
    exchange = read_completion({"prompt": "hi", "stream": True})
    call: Any = SimpleNamespace(exchange=exchange, about=Call("id", 7, "model"), finals={})
    frames = Chunks(call).frames([(0, Event(UNLOGGED, PROGRESS, '{"done":1,"total":2}'))])
    assert frames == KEEP_ALIVE


def test_only_the_last_chunk_has_usage_and_only_where_asked_for(http: FlaskClient, live: ScriptedWorker) -> None:
    blocks = stream(http, "completions", PLAIN | {"stream_options": {"include_usage": True}})
    live.run_all(["a", "b"])
    *chunks, last, done = data(blocks)
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    blocks = stream(http, "completions", PLAIN)
    live.run_all(["a"])
    assert not any("usage" in chunk for chunk in data(blocks)[:-1])


def test_a_silent_stream_gets_comments(http: FlaskClient, live: ScriptedWorker) -> None:
    with http.post("/v1/completions", json=PLAIN) as answer:
        blocks = frames(answer.iter_encoded())
        assert [next(blocks).comment for _ in range(3)] == ["connected", "keep-alive", "keep-alive"]


def test_choices_come_together_as_their_tokens_do(http: FlaskClient, live: ScriptedWorker) -> None:
    blocks = stream(http, "completions", PLAIN | {"n": 3})
    next(blocks)
    jobs = sorted((live.pull() for _ in range(3)), key=lambda job: job.record.id)
    for index in range(2):
        for choice in (2, 0, 1):
            live.token(jobs[choice], index, f"{choice}{index} ")
            assert next(blocks).json()["choices"][0]["index"] == choice
    for choice in (1, 2, 0):
        live.finish(jobs[choice], "", 2)
        assert next(blocks).json()["choices"][0]["finish_reason"] == "length"
    assert [block.data for block in blocks] == ["[DONE]"]


def test_many_choices_whose_tokens_rain_in_are_whole_and_in_order(http: FlaskClient, live: ScriptedWorker) -> None:
    blocks = stream(http, "completions", PLAIN | {"n": 40})
    jobs = sorted((live.pull() for _ in range(40)), key=lambda job: int(job.record.id.split("-")[1]))
    for index in range(20):
        for job in jobs:
            live.token(job, index, f"{index} ")
    for job in jobs:
        live.finish(job, "", 20)
    found = data(blocks)
    assert {texts(found, choice) for choice in range(40)} == {"".join(f"{index} " for index in range(20))}
    assert found.count("[DONE]") == 1


def test_a_failure_in_mid_stream_is_one_error_frame_and_no_done(http: FlaskClient, live: ScriptedWorker) -> None:
    blocks = stream(http, "completions", PLAIN)
    job = live.pull()
    live.token(job, 0, "a")
    error = GenerationTimeout("too long")
    live.fail(job, error, "a", 1)
    first, last = data(blocks)
    assert first["choices"][0]["text"] == "a"
    assert last == {"error": error.to_dict()}


def test_the_first_failure_of_a_choice_cancels_the_others(
    http: FlaskClient, store: JobStore, live: ScriptedWorker
) -> None:
    blocks = stream(http, "completions", PLAIN | {"n": 3})
    job, running = live.pull(), live.pull()
    live.fail(job, GenerationTimeout("too long"))
    (last,) = data(blocks)
    assert last["error"]["code"] == "timeout"
    states = {record.id: (record.status, record.cancelling) for record in store.newest()}
    assert states.pop(job.record.id) == ("failed", False)
    assert states.pop(running.record.id)[1]
    assert [status for status, _ in states.values()] == ["cancelled"]


def test_a_job_that_somebody_cancels_ends_the_stream_with_an_error(
    http: FlaskClient, store: JobStore, live: ScriptedWorker
) -> None:
    blocks = stream(http, "completions", PLAIN)
    (record,) = store.newest()
    store.cancel(record.id)
    (last,) = data(blocks)
    assert last["error"]["code"] == "job_cancelled"


def test_a_job_that_is_erased_ends_the_stream_with_an_error(
    http: FlaskClient, store: JobStore, live: ScriptedWorker
) -> None:
    blocks = stream(http, "completions", PLAIN)
    (record,) = store.newest()
    store.erase(record.id)
    assert data(blocks)[-1]["error"]["code"] in ("job_removed", "job_cancelled")


def test_an_interrupted_job_goes_on_without_a_token_twice(http: FlaskClient, live: ScriptedWorker) -> None:
    blocks = stream(http, "completions", PLAIN)
    job = live.pull()
    live.started(job)
    live.token(job, 0, "a")
    live.store.hand_back(live.name, [(job.record.id, job.execution)])
    again = live.pull()
    live.started(again, tokens=1)
    live.token(again, 0, "a")  # written again after a lost reply
    live.token(again, 1, "b")
    live.finish(again, "ab", 2)
    assert texts(data(blocks)) == "ab"


def test_a_lost_subscription_leaves_no_gap(http: FlaskClient, client: Any, live: ScriptedWorker) -> None:
    blocks = stream(http, "completions", PLAIN | {"n": 2})
    jobs = [live.pull(), live.pull()]
    for job in jobs:
        live.token(job, 0, "a")
    assert [next(blocks).comment is None for _ in range(3)] == [False, True, True]
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    for job in jobs:
        live.token(job, 1, "b")
        live.finish(job, "ab", 2)
    found = data(blocks)
    assert [texts(found, choice) for choice in range(2)] == ["b", "b"]
    assert found[-1] == "[DONE]"


@pytest.mark.parametrize("background", [False, True])
def test_a_stopping_server_ends_a_stream_with_an_error(
    app: Flask, http: FlaskClient, store: JobStore, live: ScriptedWorker, background: bool
) -> None:
    with http.post("/v1/completions", json=PLAIN | {"background": background}) as answer:
        blocks = frames(answer.iter_encoded())
        next(blocks)
        services_of(app).hub.close()
        (last,) = data(blocks)
    assert last["error"]["code"] == "unavailable"
    (record,) = store.newest()
    assert record.status == ("queued" if background else "cancelled")


def test_a_defect_is_an_error_frame_without_details_and_cancels_the_job(
    http: FlaskClient,
    store: JobStore,
    live: ScriptedWorker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompletionExchange, "chunk", lambda *_: {}["secret"])
    blocks = stream(http, "completions", PLAIN)
    job = live.pull()
    live.token(job, 0, "a")
    (last,) = data(blocks)
    assert last["error"]["code"] == "internal_error"
    assert "secret" in caplog.text and "secret" not in str(last)
    assert store.fetch(job.record.id).cancelling
