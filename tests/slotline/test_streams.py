from __future__ import annotations

import threading
import time

import pytest

from slotline import (
    ApiError,
    Client,
    ConnectionFailed,
    JobCancelled,
    JobFailed,
    ProtocolError,
    StreamGap,
    StreamTimeout,
    Token,
    TokenStream,
    follow,
)
from tests.slotline.scripted import (
    COMMENT,
    STARTED,
    Handler,
    ScriptedServer,
    answer,
    done,
    error,
    events,
    frame,
    job,
    token,
)

EVENTS = "/v1/jobs/job1/events"


def left(handler: Handler) -> None:
    assert handler.reader_left()


def last_ids(server: ScriptedServer) -> list[str | None]:
    return [asked.headers.get("Last-Event-ID") for asked in server.asked_for(EVENTS)]


def test_tokens_come_one_by_one_and_are_their_text(server: ScriptedServer, api: Client) -> None:
    held = frame("token", {"index": 2, "text": "rest", "token": None}, "2")
    server.on("GET", EVENTS, events(STARTED, token(0), token(1, ""), held, done(text="t0 rest")))
    stream = api.stream("hello")
    tokens = list(stream)
    assert tokens == [Token("t0 ", 0, 100), Token("", 1, 101), Token("rest", 2, None)]
    assert "".join(map(str, tokens)) == stream.result.text == "t0 rest"
    assert list(stream) == []
    assert server.asked[0].body == {"prompt": "hello", "stream": True}


def test_the_job_is_submitted_before_the_first_token_is_asked_for(server: ScriptedServer, api: Client) -> None:
    with api.stream("hello") as stream:
        assert (stream.job_id, len(server.asked)) == ("job1", 1)


def test_a_dropped_connection_is_taken_up_after_the_last_token(server: ScriptedServer, api: Client) -> None:
    server.on(
        "GET",
        EVENTS,
        events(STARTED, token(0), token(1), then=Handler.drop),
        events(token(2), token(3)[:-1], then=Handler.drop),  # its last byte is missing: it never came
        events(COMMENT, then=Handler.drop),
        events(token(3), done()),
    )
    assert [t.index for t in api.stream("hello")] == [0, 1, 2, 3]
    assert last_ids(server) == [None, "1", "2", "2"]


def test_tokens_that_come_again_are_not_given_again(server: ScriptedServer, api: Client) -> None:
    server.on(
        "GET",
        EVENTS,
        events(STARTED, token(0), token(1), then=Handler.drop),
        events(STARTED, token(0), token(1), token(1), token(2), done()),
    )
    assert [t.index for t in api.stream("hello")] == [0, 1, 2]


def test_a_hole_is_read_again_from_the_token_before_it(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(2), done()), events(token(1), token(2), done()))
    assert [t.index for t in api.stream("hello")] == [0, 1, 2]
    assert last_ids(server) == [None, "0"]


def test_a_hole_that_stays_is_an_error_and_never_skipped(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(2), done()), events(token(2), done()))
    stream = api.stream("hello")
    assert next(stream).index == 0
    with pytest.raises(ProtocolError, match="token 1 is missing before token 2"):
        next(stream)


def gap(tokens: int, text: str | None) -> bytes:
    data = {"tokens": tokens, "text": text, "reasoning_content": None, "tool_calls": None}
    return frame("gap", data, str(tokens - 1))


def test_text_that_the_server_no_longer_has_token_by_token_comes_as_one(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), then=Handler.drop), events(gap(4, "t0 and more"), done()))
    assert list(api.stream("hello")) == [Token("t0 ", 0, 100), Token("and more", 3, None)]


def test_a_gap_that_lacks_nothing_is_passed_over(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), gap(1, "t0 "), done()))
    assert [t.index for t in api.stream("hello")] == [0]


@pytest.mark.parametrize(("after", "text"), [(-1, None), (-1, "other"), (0, "t0 and more")])
def test_text_that_nobody_knows_is_an_error_and_the_stream_goes_on(
    server: ScriptedServer, api: Client, after: int, text: str | None
) -> None:
    given = [STARTED, token(0)] if after < 0 else [STARTED]
    server.on("GET", EVENTS, events(*given, gap(4, text), token(4), done()))
    stream = api.job("job1").stream(after=after)
    if after < 0:
        next(stream)
    with pytest.raises(StreamGap, match="tokens 1 to 3 of job job1 are lost") as caught:
        next(stream)
    assert caught.value.job_id == "job1"
    assert [t.index for t in stream] == [4]


def test_time_without_a_slot_does_not_count(server: ScriptedServer, api: Client) -> None:
    resumed = threading.Event()

    def resume_late(handler: Handler) -> None:
        for _ in range(6):
            handler.write(COMMENT)
            resumed.wait(0.15)
        handler.write(frame("resumed", {"prompt_tokens": 3, "tokens": 1}))

    paused = frame("paused", {"tokens": 1, "reason": "displaced"})
    server.on("GET", EVENTS, events(STARTED, token(0), paused, resume_late, token(1), done()))
    assert [t.index for t in api.stream("hello", timeout=0.5)] == [0, 1]


def test_no_token_in_time_ends_the_wait_and_not_the_job(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), COMMENT, left), events(token(1), done()))
    stream = api.stream("hello", timeout=0.8)
    next(stream)
    with pytest.raises(StreamTimeout, match=r"within 0\.8 s; the job lives on") as caught:
        next(stream)
    assert caught.value.job_id == "job1"
    assert isinstance(caught.value, TimeoutError)
    assert [t.index for t in stream] == [1]
    assert {asked.method for asked in server.asked_for(EVENTS)} == {"GET"}
    assert not server.asked_for("/v1/jobs/job1/cancel")


def test_the_wait_for_the_first_token_counts_from_the_start_of_the_job(server: ScriptedServer, api: Client) -> None:
    started = threading.Event()

    def start_late(handler: Handler) -> None:
        for _ in range(4):
            handler.write(COMMENT)
            started.wait(0.15)
        handler.write(STARTED)

    server.on("GET", EVENTS, events(start_late, left))
    began = time.monotonic()
    with pytest.raises(StreamTimeout):
        next(api.stream("hello", timeout=0.3))
    assert time.monotonic() - began >= 0.85


def test_a_start_that_is_told_again_after_a_reconnect_gives_no_more_time(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, lambda handler: threading.Event().wait(0.1)))
    with pytest.raises(StreamTimeout):
        next(api.stream("hello", timeout=0.8))
    assert len(server.asked_for(EVENTS)) > 1


def test_a_job_taken_up_by_another_worker_gets_its_time_anew(server: ScriptedServer, api: Client) -> None:
    def slow(handler: Handler) -> None:
        for attempt in range(2, 5):
            threading.Event().wait(0.3)
            handler.write(frame("resumed", {"attempt": attempt}))

    server.on("GET", EVENTS, events(STARTED, slow, token(0), done()))
    assert [t.index for t in api.stream("hello", timeout=0.85)] == [0]


def test_a_slow_reader_is_not_late(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    stream = api.stream("hello", timeout=0.8)
    next(stream)
    threading.Event().wait(0.9)
    assert [t.index for t in stream] == [1]


def test_a_failed_job_raises_with_the_text_so_far(server: ScriptedServer, api: Client) -> None:
    failed = job("failed", text="t0 ", error={"message": "used up its 2 s", "code": "timeout", "param": None})
    server.on("GET", EVENTS, events(STARTED, token(0), frame("failed", failed, "end")))
    stream = api.stream("hello")
    next(stream)
    with pytest.raises(JobFailed, match="job job1 failed: used up its 2 s") as caught:
        next(stream)
    assert (caught.value.text, caught.value.code, caught.value.job_id) == ("t0 ", "timeout", "job1")
    assert caught.value.job["status"] == "failed"


def test_a_cancelled_job_raises_with_the_text_so_far(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), done(status="cancelled", text="t0 ")))
    with pytest.raises(JobCancelled, match="job1 was cancelled") as caught:
        list(api.stream("hello"))
    assert (caught.value.text, caught.value.code) == ("t0 ", None)


def by_close(stream: TokenStream, api: Client) -> None:
    with stream:
        next(stream)
    assert list(stream) == []


def by_break(stream: TokenStream, api: Client) -> None:
    for _ in stream:
        break


def by_closing_the_client(stream: TokenStream, api: Client) -> None:
    next(stream)
    api.close()
    with pytest.raises(RuntimeError):
        next(stream)


@pytest.mark.parametrize("leave", [by_close, by_break, by_closing_the_client])
def test_leaving_early_closes_the_connection(server: ScriptedServer, api: Client, leave) -> None:
    gone = threading.Event()

    def wait_for_leave(handler: Handler) -> None:
        if handler.reader_left():
            gone.set()

    server.on("GET", EVENTS, events(STARTED, token(0), wait_for_leave))
    leave(api.stream("hello"), api)
    assert gone.wait(30)


def test_a_server_that_is_away_is_looked_for_and_then_given_up(
    server: ScriptedServer, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "RECONNECT_S", 0.8)
    server.on("GET", EVENTS, events(STARTED, token(0), then=Handler.drop), Handler.drop)
    stream = api.stream("hello")
    next(stream)
    with pytest.raises(ConnectionFailed) as caught:
        next(stream)
    assert caught.value.job_id == "job1"
    assert len(server.asked_for(EVENTS)) > 2


def test_a_busy_or_restarting_server_is_asked_again(server: ScriptedServer, api: Client) -> None:
    server.on(
        "GET",
        EVENTS,
        answer("<html>", 502, "text/html"),
        answer(error(503, "unavailable", "too many streams"), 503, Retry_After="0"),
        events(STARTED, token(0), done()),
    )
    assert [t.index for t in api.stream("hello")] == [0]


def test_a_server_that_breaks_off_its_refusal_is_asked_again(server: ScriptedServer, api: Client) -> None:
    def half(handler: Handler) -> None:
        handler.write(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 100\r\n\r\n{")
        handler.drop()

    server.on("GET", EVENTS, events(STARTED, token(0), then=Handler.drop), half, events(token(1), done()))
    assert [t.index for t in api.stream("hello")] == [0, 1]


def test_a_job_that_was_erased_ends_the_stream_with_the_servers_error(server: ScriptedServer, api: Client) -> None:
    gone = answer(error(404, "job_not_found", "there is no job 'job1'", "id"), 404)
    server.on("GET", EVENTS, events(STARTED, token(0), then=Handler.drop), gone)
    with pytest.raises(ApiError, match="there is no job") as caught:
        list(api.stream("hello"))
    assert caught.value.code == "job_not_found"


def test_an_answer_that_is_no_event_stream_is_a_protocol_error(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, answer("<html>sign in</html>", 200, "text/html"))
    with pytest.raises(ProtocolError, match="without an event stream"):
        list(api.stream("hello"))


def test_a_stream_can_begin_after_a_token_seen_before(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(token(5), done()))
    assert [t.index for t in api.job("job1").stream(after=4)] == [5]
    assert last_ids(server) == ["4"]
