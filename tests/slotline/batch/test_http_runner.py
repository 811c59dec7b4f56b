from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slotline import calls as module
from slotline.batch.http_runner import HttpRunner
from slotline.batch.lines import Line
from slotline.batch.rows import Outcome
from slotline.batch.runner import RunnerLost
from tests.slotline.scripted import ScriptedServer, answer, error, job

MODELS = {"data": [{"id": "m", "alias": "em", "live_workers": 0}, {"id": "n", "alias": "", "live_workers": 1}]}
STATS = {"workers": [{"model": "n", "n_parallel": 4}, {"model": "n", "n_parallel": 8}, {"model": "m", "n_parallel": 2}]}

PLAIN = Line(3, {"prompt": "a"}, "/v1/jobs", {"prompt": "a"})
OPENAI = Line(3, {}, "/v1/chat/completions", {"messages": []}, custom_id="x")

Open = Callable[..., HttpRunner]


@pytest.fixture
def opened(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    server._replies.clear()
    server.on("GET", "/v1/models", answer(MODELS))
    server.on("GET", "/v1/stats", answer(STATS))
    made: list[HttpRunner] = []

    def open_runner(model: str | None = None, patience_s: float = 30.0) -> HttpRunner:
        made.append(HttpRunner(server.url, model, patience_s))
        return made[-1]

    yield open_runner
    for runner in made:
        runner.close()


def run(runner: HttpRunner, line: Line) -> Outcome:
    runner.start(line)
    (outcome,) = runner.ended(10)
    return outcome


def test_it_takes_the_model_that_is_live_and_counts_all_its_slots(opened: Open, server: ScriptedServer) -> None:
    runner = opened()
    assert (runner.model, runner.slots, runner.where) == ("n", 12, server.url)
    assert opened("em").model == "m"


def test_a_model_that_is_not_there_is_refused_with_those_that_are(opened: Open) -> None:
    with pytest.raises(RunnerLost, match=r"no model 'gpt' at http.*; its models are: m, n"):
        opened("gpt")


def test_a_server_without_a_model_or_that_is_not_there_is_refused(opened: Open, server: ScriptedServer) -> None:
    server._replies.clear()
    server.on("GET", "/v1/models", answer({"data": []}))
    with pytest.raises(RunnerLost, match="no model yet"):
        opened()
    with pytest.raises(RunnerLost, match="no server answers"):
        HttpRunner("http://127.0.0.1:9", None)


def test_a_plain_line_is_a_batch_job_with_an_id_of_this_start(opened: Open, server: ScriptedServer) -> None:
    server.on("POST", "/v1/jobs", answer(job()))
    outcome = run(opened(), PLAIN)
    assert outcome.answer is not None
    assert outcome.answer["text"] == "t0 t1 "
    run(opened(), PLAIN)
    first, second = (asked.body for asked in server.asked_for("/v1/jobs"))
    ids = {first.pop("id"), second.pop("id")}
    assert len(ids) == 2, "a failed line has to run anew"
    assert all(job_id.endswith("-3") for job_id in ids)
    assert first == {"model": "n", "priority": "batch", "result_ttl_s": 300, "prompt": "a"}


def test_an_openai_line_is_a_call_of_its_endpoint(opened: Open, server: ScriptedServer) -> None:
    server.on("POST", "/v1/chat/completions", answer({"id": "chatcmpl-1", "choices": []}))
    outcome = run(opened(), OPENAI)
    assert outcome.answer == {"id": "chatcmpl-1", "choices": []}
    assert (outcome.request_id, outcome.status) == ("chatcmpl-1", 200)
    assert server.asked[-1].body == {"priority": "batch", "model": "n", "messages": []}


@pytest.mark.parametrize("line", [PLAIN, OPENAI])
def test_a_refusal_is_the_lines_own_error(opened: Open, server: ScriptedServer, line: Line) -> None:
    server.on("POST", line.endpoint, answer(error(400, "invalid_request", "no", "prompt"), 400))
    outcome = run(opened(), line)
    assert outcome.error == {"message": "no", "type": "kind_400", "code": "invalid_request", "param": "prompt"}
    assert outcome.status == 400


@pytest.mark.parametrize(
    ("ended", "code"),
    [(job("failed", error={"message": "m", "code": "timeout"}), "timeout"), (job("cancelled"), "cancelled")],
)
def test_a_job_that_did_not_complete_is_a_failed_line(
    opened: Open, server: ScriptedServer, ended: dict[str, Any], code: str
) -> None:
    server.on("POST", "/v1/jobs", answer(ended))
    outcome = run(opened(), PLAIN)
    assert outcome.error is not None
    assert outcome.error["code"] == code


def test_a_server_that_stays_away_is_no_failure_of_a_line(opened: Open, server: ScriptedServer) -> None:
    server.on("POST", "/v1/jobs", answer(error(503, "redis_unavailable", "Redis does not answer"), 503))
    runner = opened(patience_s=0.0)
    runner.start(PLAIN)
    with pytest.raises(RunnerLost, match="Redis does not answer.*not been well for too long"):
        runner.ended(10)


def test_tokens_are_counted_by_the_server(opened: Open, server: ScriptedServer) -> None:
    server.on("POST", "/v1/tokenize", answer({"tokens": [1, 2, 3]}))
    assert opened().count_tokens("abc") == 3
    assert server.asked[-1].body == {"content": "abc", "model": "n"}
