from __future__ import annotations

from datetime import UTC, datetime

import pytest

from slotline import ApiError, Client, ConnectionFailed, ProtocolError, ResultTimeout
from slotline.transport import ATTEMPTS
from tests.processes import free_port
from tests.slotline.scripted import STARTED, ScriptedServer, answer, done, error, events, job, lost, token

EVENTS = "/v1/jobs/job1/events"


def test_generate_gives_the_text_and_what_belongs_to_it(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    result = api.generate("hello", max_tokens=2, temperature=None)
    assert (result.text, str(result), result.finish_reason, result.job_id) == ("t0 t1 ", "t0 t1 ", "stop", "job1")
    assert (result.usage["completion_tokens"], result.seed, result.model) == (2, 7, "m")
    assert server.asked[0].body == {"prompt": "hello", "max_tokens": 2}


def test_generate_that_takes_too_long_names_the_job_and_leaves_it_alone(server: ScriptedServer, api: Client) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), lambda handler: handler.reader_left()))
    with pytest.raises(ResultTimeout, match=r"job1 did not end within .* it lives on") as caught:
        api.generate("hello", timeout=0.8)
    assert caught.value.job_id == "job1"
    assert [asked.method for asked in server.asked] == ["POST", "GET"]


class Odd(int):
    """An integer of another library."""


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), range(1, 4), [Odd(1), Odd(2), Odd(3)]])
def test_token_ids_are_sent_as_they_are(server: ScriptedServer, api: Client, ids) -> None:
    server.on("GET", EVENTS, events(STARTED, done()))
    api.submit(ids)
    api.generate(ids)
    api.stream(ids).close()
    assert [asked.body["prompt"] for asked in server.asked_for("/v1/jobs")] == [[1, 2, 3]] * 3


def test_messages_options_and_times_are_sent_as_json(server: ScriptedServer, api: Client) -> None:
    moment = datetime(2030, 1, 2, tzinfo=UTC)
    api.submit(messages=[{"role": "user", "content": "hi"}], run_at=moment, logit_bias={5: -1.5}, stop=["x"])
    assert server.asked[0].body == {
        "messages": [{"role": "user", "content": "hi"}],
        "run_at": "2030-01-02T00:00:00+00:00",
        "logit_bias": {"5": -1.5},
        "stop": ["x"],
    }


@pytest.mark.parametrize("given", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}])
def test_neither_or_both_kinds_of_prompt_is_the_callers_mistake(api: Client, given: dict) -> None:
    with pytest.raises(TypeError, match="either a prompt or messages"):
        api.submit(**given)


def test_a_submit_whose_reply_was_lost_is_sent_again_with_the_same_key(
    server: ScriptedServer, api: Client, waits: list[float]
) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", lost, lost, answer(job("queued"), 202))
    assert api.submit("a").id == "job1"
    assert api.submit("a").id == "job1"
    first, *again, other = [asked.headers["Idempotency-Key"] for asked in server.asked]
    assert again == [first, first]
    assert other != first
    assert waits == sorted(waits)


def test_a_server_that_loses_every_reply_is_given_up(server: ScriptedServer, api: Client, waits: list[float]) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", lost)
    with pytest.raises(ConnectionFailed, match="was lost") as caught:
        api.submit("a")
    assert not caught.value.refused
    assert len(server.asked) == ATTEMPTS


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(
    server: ScriptedServer, api: Client, waits: list[float], status: int
) -> None:
    busy = answer(error(status, "queue_full", "the queue is full"), status, Retry_After="2")
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", busy, busy, answer(job("queued"), 202))
    assert api.submit("a").id == "job1"
    assert waits == [2, 2]


def test_a_server_that_stays_busy_is_asked_so_often_and_no_more(
    server: ScriptedServer, api: Client, waits: list[float]
) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", answer(error(429, "queue_full", "full"), 429, Retry_After="1"))
    with pytest.raises(ApiError) as caught:
        api.submit("a")
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 1)
    assert len(server.asked) == ATTEMPTS


@pytest.mark.parametrize("headers", [{"Retry_After": "9"}, {}, {"Retry_After": "soon"}])
def test_a_wait_that_is_too_long_or_unnamed_is_not_begun(
    server: ScriptedServer, api: Client, waits: list[float], headers: dict[str, str]
) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", answer(error(503, "redis_unavailable", "no Redis"), 503, **headers))
    with pytest.raises(ApiError, match="no Redis"):
        api.submit("a")
    assert (waits, len(server.asked)) == ([], 1)


def test_a_moment_to_come_back_at_is_understood(server: ScriptedServer, api: Client, waits: list[float]) -> None:
    server.on("GET", "/v1/stats", answer({}, 503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"), answer({"workers": []}))
    assert api.stats() == {"workers": []}
    assert waits == [0]


def test_the_servers_error_is_raised_with_its_parts(server: ScriptedServer, api: Client) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", answer(error(400, "invalid_request", "`top_p` is 2", "top_p"), 400))
    with pytest.raises(ApiError, match=r"`top_p` is 2 \(HTTP 400, invalid_request, top_p\)") as caught:
        api.submit("a", top_p=2)
    found = caught.value
    assert (found.status, found.code, found.param, found.message) == (400, "invalid_request", "top_p", "`top_p` is 2")


@pytest.mark.parametrize("body", ["<html>Bad Gateway</html>", '{"detail": "x"}', "[]", '{"error": "text"}'])
def test_an_error_that_is_not_of_our_form_shows_what_came(server: ScriptedServer, api: Client, body: str) -> None:
    server.on("GET", "/v1/stats", answer(body, 502, "text/html"))
    with pytest.raises(ApiError) as caught:
        api.stats()
    assert (caught.value.status, caught.value.code, caught.value.message) == (502, "unknown", body)


def test_another_server_than_ours_is_a_protocol_error(server: ScriptedServer, api: Client) -> None:
    server.on("GET", "/v1/stats", answer("<html>hello</html>", 200, "text/html"))
    with pytest.raises(ProtocolError, match="did not answer with JSON"):
        api.stats()


def test_nobody_there_is_told_at_once() -> None:
    with Client(f"http://127.0.0.1:{free_port()}") as api, pytest.raises(ConnectionFailed, match="no server") as caught:
        api.submit("a")
    assert caught.value.refused
    assert isinstance(caught.value, ConnectionError)


def test_a_server_that_does_not_answer_is_given_up_in_time(server: ScriptedServer) -> None:
    server.on("GET", "/v1/stats", lambda handler: handler.reader_left())
    with Client(server.url, timeout=0.2) as api, pytest.raises(ConnectionFailed, match="in time"):
        api.stats()


@pytest.mark.parametrize("url", ["http://", "ftp://here", "http://here:port", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConnectionFailed, match="is not the URL of a server"):
        Client(url)


def test_the_scheme_may_be_left_out() -> None:
    with Client("localhost:8000/") as api:
        assert api.base_url == "http://localhost:8000"


def test_an_address_may_end_as_users_of_the_openai_package_write_it() -> None:
    with Client("http://127.0.0.1:8000/v1/") as api:
        assert api.base_url == "http://127.0.0.1:8000"


def test_the_other_endpoints(server: ScriptedServer, api: Client) -> None:
    server.on("POST", "/v1/tokenize", answer({"tokens": [5, 6]}))
    server.on("POST", "/v1/detokenize", answer({"content": "hi"}))
    server.on("GET", "/v1/models", answer({"object": "list", "data": [{"id": "m"}]}))
    server.on("GET", "/v1/jobs", answer({"object": "list", "data": [], "has_more": False, "next": None}))
    assert api.tokenize("hi") == [5, 6]
    assert api.detokenize((5, Odd(6)), model="m") == "hi"
    assert api.models() == [{"id": "m"}]
    assert api.jobs(status="failed", after=None)["data"] == []
    bodies = [asked.body for asked in server.asked[:2]]
    assert bodies == [{"content": "hi"}, {"tokens": [5, 6], "model": "m"}]
    assert server.asked[-1].path == "/v1/jobs?status=failed"


def test_the_server_is_found_by_the_variable(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_URL", server.url)
    with Client() as api:
        assert api.submit("a").id == "job1"


def test_a_proxy_of_the_environment_is_not_asked_for_this_very_machine(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Client(server.url) as api:
        assert api.submit("a").id == "job1"


def test_a_closed_client_sends_nothing(server: ScriptedServer) -> None:
    api = Client(server.url)
    api.close()
    with pytest.raises(RuntimeError):
        api.submit("a")


def test_the_client_says_who_it_is(server: ScriptedServer, api: Client) -> None:
    api.submit("a")
    assert server.asked[0].headers["User-Agent"].startswith("slotline/")
    assert "httpx" not in server.asked[0].headers["User-Agent"]
