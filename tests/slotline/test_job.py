from __future__ import annotations

import threading

import pytest

from slotline import ApiError, Client, ConnectionFailed, JobCancelled, JobFailed, ProtocolError, ResultTimeout
from tests.slotline.scripted import STARTED, Handler, ScriptedServer, answer, done, error, events, frame, job, token

EVENTS = "/v1/jobs/job1/events"


def test_a_handle_needs_the_id_alone(server: ScriptedServer, api: Client) -> None:
    server.on("GET", "/v1/jobs/job1", answer(job("running", text="t0 ")))
    handle = api.job("job1")
    assert (handle.id, repr(handle), server.asked) == ("job1", "<Job job1>", [])
    assert handle.status() == "running"
    assert handle.info()["text"] == "t0 "


def test_the_result_is_there_once_the_job_ends(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), then=Handler.drop), events(token(1), done()))
    assert api.submit("a").result().text == "t0 t1 "


def test_no_end_in_time_names_the_job(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, lambda handler: handler.reader_left()))
    with pytest.raises(ResultTimeout, match=r"within 0\.2 s") as caught:
        api.job("job1").result(timeout=0.2)
    assert caught.value.job_id == "job1"


def test_a_server_that_does_not_even_answer_is_no_reason_to_be_late(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, then=Handler.drop), lambda handler: handler.reader_left())
    with pytest.raises(ResultTimeout):
        api.job("job1").result(timeout=0.3)


@pytest.mark.parametrize(
    ("name", "status", "kind"), [("failed", "failed", JobFailed), ("done", "cancelled", JobCancelled)]
)
def test_a_job_that_did_not_complete_raises(
    server: ScriptedServer, api: Client, name: str, status: str, kind: type[Exception]
) -> None:
    server.on("GET", EVENTS, events(frame(name, job(status, text=None), "end")))
    with pytest.raises(kind) as caught:
        api.job("job1").result()
    assert caught.value.text == ""


def test_an_end_that_is_none_is_a_protocol_error(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(frame("done", job("running"), "end")))
    with pytest.raises(ProtocolError, match="said to have ended, but is 'running'"):
        api.job("job1").result()


def test_cancel_gives_the_job_and_is_repeated_if_its_reply_was_lost(
    server: ScriptedServer, api: Client, waits: list[float]
) -> None:
    server.on("POST", "/v1/jobs/job1/cancel", Handler.drop, answer(job("cancelled")))
    assert api.job("job1").cancel()["status"] == "cancelled"
    assert len(waits) == 1


def test_cancelling_an_ended_job_is_the_servers_error(server: ScriptedServer, api: Client) -> None:
    server.on("POST", "/v1/jobs/job1/cancel", answer(error(409, "job_already_ended", "it is completed", "id"), 409))
    with pytest.raises(ApiError) as caught:
        api.job("job1").cancel()
    assert (caught.value.status, caught.value.code) == (409, "job_already_ended")


def test_an_odd_id_leads_nowhere_else(server: ScriptedServer, api: Client) -> None:
    with pytest.raises(ApiError) as caught:
        api.job("../stats?x").status()
    assert caught.value.status == 404
    assert server.asked[0].path == "/v1/jobs/..%2Fstats%3Fx"


def test_nobody_there_is_told_at_once_and_with_the_job() -> None:
    with Client("http://127.0.0.1:9") as api, pytest.raises(ConnectionFailed) as caught:
        api.job("job1").result()
    assert caught.value.job_id == "job1"


def test_one_client_serves_many_threads(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(api.generate("a").text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["t0 t1 "] * 8
    assert len({asked.headers["Idempotency-Key"] for asked in server.asked_for("/v1/jobs")}) == 8
