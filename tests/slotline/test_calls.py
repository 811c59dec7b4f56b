from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from slotline import calls as module
from slotline.calls import Answer, Calls
from slotline.errors import ApiError, ConnectionFailed, ProtocolError
from tests.slotline.scripted import Handler, ScriptedServer, answer, error, job, lost

Open = Callable[..., Calls]

FULL = answer(error(429, "queue_full", "the queue is full"), 429, Retry_After="0")
NOT_WELL = answer(error(503, "redis_unavailable", "Redis does not answer"), 503)


@pytest.fixture
def calls(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Calls to the scripted server that pause for no time between repeats."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "MOST_PAUSE_S", 0.0)
    server._replies.clear()
    opened: list[Calls] = []

    def open_calls(patience_s: float = 30.0) -> Calls:
        opened.append(Calls(server.url, patience_s))
        return opened[-1]

    yield open_calls
    for each in opened:
        each.close()


def run(calls: Calls, job_id: str = "j1") -> Answer:
    calls.run_job("key", {"id": job_id, "prompt": "a"})
    (found,) = calls.ended(10)
    return found


def test_a_job_is_submitted_with_its_id_and_waited_for(server: ScriptedServer, calls: Open) -> None:
    server.on("POST", "/v1/jobs", answer(job()))
    found = run(calls())
    assert (found.key, found.job_id, found.error) == ("key", "j1", None)
    assert found.body is not None
    assert found.body["text"] == "t0 t1 "
    (asked,) = server.asked
    assert asked.path == "/v1/jobs?wait=45.0"
    assert asked.body == {"id": "j1", "prompt": "a"}


def test_a_job_that_is_not_over_yet_is_asked_for_again_under_the_same_id(server: ScriptedServer, calls: Open) -> None:
    server.on("POST", "/v1/jobs", answer(job("queued"), 202), answer(job("running"), 202), answer(job("failed")))
    found = run(calls())
    assert found.body is not None
    assert found.body["status"] == "failed"
    assert [asked.body["id"] for asked in server.asked] == ["j1", "j1", "j1"]


def test_an_answer_that_is_lost_and_a_queue_that_is_full_are_no_failures(server: ScriptedServer, calls: Open) -> None:
    server.on("POST", "/v1/jobs", lost, FULL, FULL, NOT_WELL, answer("bad gateway", 502), answer(job()))
    found = run(calls())
    assert found.error is None
    assert len(server.asked) == 6


def test_a_full_queue_is_waited_for_however_long_it_takes(server: ScriptedServer, calls: Open) -> None:
    server.on("POST", "/v1/jobs", *[FULL] * 50, answer(job()))
    assert run(calls(patience_s=0.0)).error is None


def test_a_refusal_is_told_at_once(server: ScriptedServer, calls: Open) -> None:
    server.on("POST", "/v1/jobs", answer(error(400, "invalid_request", "`prompt` is empty", "prompt"), 400))
    found = run(calls())
    assert isinstance(found.error, ApiError)
    assert (found.error.code, found.error.param, found.error.kind) == ("invalid_request", "prompt", "kind_400")


def test_a_time_limit_of_the_job_is_an_answer_and_that_of_a_proxy_is_not(server: ScriptedServer, calls: Open) -> None:
    ours = answer(error(504, "timeout", "the job used up its time"), 504)
    server.on("POST", "/v1/chat/completions", answer("gateway timeout", 504), ours)
    mine = calls()
    mine.post("key", "/v1/chat/completions", {})
    (found,) = mine.ended(10)
    assert isinstance(found.error, ApiError)
    assert (found.error.code, len(server.asked)) == ("timeout", 2)


def test_a_server_that_stays_away_is_given_up(calls: Open, server: ScriptedServer) -> None:
    server.on("POST", "/v1/jobs", lost)
    mine = calls(patience_s=0.0)
    assert isinstance(run(mine).error, ConnectionFailed)


def test_trouble_is_told_until_it_is_over(server: ScriptedServer, calls: Open) -> None:
    mine = calls()
    seen: list[str | None] = []

    def look(handler: Handler) -> None:
        seen.append(mine.trouble)
        answer(job())(handler)

    server.on("POST", "/v1/jobs", FULL, look)
    run(mine)
    assert seen == ["the queue is full (HTTP 429, queue_full)"]
    assert mine.trouble is None


def test_another_servers_answer_is_an_error_of_its_call_alone(server: ScriptedServer, calls: Open) -> None:
    server.on("POST", "/v1/jobs", answer("<html>", content_type="text/html"), answer(job()))
    mine = calls()
    assert isinstance(run(mine).error, ProtocolError)
    assert run(mine).error is None


def test_what_is_no_json_is_an_error_of_its_call_alone(server: ScriptedServer, calls: Open) -> None:
    server.on("POST", "/v1/jobs", answer(job()))
    mine = calls()
    mine.run_job("bad", {"id": "j1", "temperature": float("nan")})
    (found,) = mine.ended(10)
    assert "ValueError" in str(found.error)
    assert run(mine).error is None


def test_closing_cancels_jobs_and_hangs_up_on_calls(server: ScriptedServer, calls: Open) -> None:
    arrived = threading.Semaphore(0)
    left: list[bool] = []

    def hang(handler: Handler) -> None:
        arrived.release()
        left.append(handler.reader_left())

    server.on("POST", "/v1/jobs", hang)
    server.on("POST", "/v1/completions", hang)
    server.on("POST", "/v1/jobs/j1/cancel", answer(job("cancelled")))
    mine = calls()
    mine.run_job("job", {"id": "j1"})
    mine.post("call", "/v1/completions", {})
    assert arrived.acquire(timeout=30)
    assert arrived.acquire(timeout=30)
    mine.close()
    assert len(server.asked_for("/v1/jobs/j1/cancel")) == 1
    assert mine.ended(0.0) == []


def test_many_calls_are_under_way_at_once(server: ScriptedServer, calls: Open) -> None:
    together = threading.Barrier(20, timeout=30)

    def meet(handler: Handler) -> None:
        together.wait()
        answer(job())(handler)

    server.on("POST", "/v1/jobs", meet)
    mine = calls()
    for number in range(20):
        mine.run_job(number, {"id": f"j{number}"})
    keys: set[int] = set()
    while len(keys) < 20:
        keys |= {found.key for found in mine.ended(10)}
    assert keys == set(range(20))
