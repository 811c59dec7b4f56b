from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from slotline.cli import cli
from slotline.load import Load, drive, percentiles
from tests.slotline.scripted import STARTED, ScriptedServer, answer, done, error, events, frame, job, lost, token

EVENTS = "/v1/jobs/job1/events"


def bench(server: ScriptedServer, *args: str):
    return CliRunner().invoke(cli, ["bench", "serve", "--base-url", server.url, "--json", *args])


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentiles([i / 1000 for i in range(100, 0, -1)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([0.001]) == {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}


def test_every_job_is_sent_once_with_a_prompt_of_its_own(server: ScriptedServer) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    figures = asyncio.run(drive(server.url, Load(concurrency=3, requests=8, max_tokens=2, prompt_tokens=10)))
    bodies = [asked.body for asked in server.asked_for("/v1/jobs")]
    prompts = [body["prompt"] for body in bodies]
    assert len(set(prompts)) == len(prompts) == 8
    assert {len(prompt.split()) for prompt in prompts} == {10}
    assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(2, True)}
    assert len(figures.ttft_s) == len(figures.gap_s) == len(figures.total_s) == 8


def test_the_figures_count_tokens_and_jobs(server: ScriptedServer) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    result = bench(server, "--concurrency", "2", "--requests", "4", "--max-tokens", "2")
    figures = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (figures["requests"], figures["failed"], figures["generated_tokens"]) == (4, 0, 8)
    assert figures["generated_tokens_per_s"] > 0
    assert figures["ttft_ms"]["p50"] > 0


def test_a_job_that_fails_is_counted_and_the_others_go_on(server: ScriptedServer) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    refused = answer(error(429, "queue_full", "the queue is full"), 429)
    server.on("POST", "/v1/jobs", refused, lost, answer(job("queued"), 202))
    failed = frame("failed", job("failed", error={"message": "dead end"}), "end")
    server.on("GET", EVENTS, events(failed), events(STARTED), events(STARTED, token(0), done()))
    result = bench(server, "--concurrency", "1", "--requests", "5")
    figures = json.loads(result.stdout)
    assert (result.exit_code, figures["requests"], figures["failed"]) == (0, 5, 4)
    assert "the queue is full" in figures["first_error"]


def test_if_every_job_fails_so_does_the_bench(server: ScriptedServer) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", answer(error(404, "model_not_found", "there is no model 'x'", "model"), 404))
    result = bench(server, "--requests", "2", "--model", "x")
    assert result.exit_code == 1
    assert "every job failed: Failed: there is no model 'x'" in result.stderr


def test_no_server_is_one_line() -> None:
    result = CliRunner().invoke(cli, ["bench", "serve", "--base-url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert result.stderr.startswith("slotline: no server answers at http://127.0.0.1:9: ")


@pytest.mark.parametrize("sizes", ["", "0", "1,x", "300"])
def test_batch_sizes_that_make_no_sense_are_refused(sizes: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "engine", "--batch", sizes])
    assert result.exit_code == 2
    assert "is not a list such as 1,8,32" in result.stderr


def test_no_more_jobs_than_there_are_can_be_constrained() -> None:
    result = CliRunner().invoke(cli, ["bench", "engine", "--batch", "4,8", "--constrained", "5"])
    assert result.exit_code == 2
    assert "--constrained cannot be more than --batch" in result.stderr
