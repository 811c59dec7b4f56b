"""A completion ends with the connection it was asked for on: real web and worker processes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from shared.jobs import JobStore
from shared.records import JobRecord
from tests.integration.conftest import Jobs, Stack, StartWeb, StartWorker
from tests.processes import WebProcess, WorkerProcess, eventually

pytestmark = pytest.mark.integration

#: Twenty milliseconds a tick, and an answer that goes on for as long as it is let.
SLOW = {"model": "fake:count:0.02", "name": "fake-echo"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 900, "temperature": 0}
HEADER = "X-Slotline-Job-Id"


@pytest.fixture(scope="module")
def worker(stack: Stack) -> WorkerProcess:
    """The worker of the stack, which most tests share; each leaves its one slot free."""
    return stack.worker(**SLOW, n_parallel=1, n_ctx=1024)


@pytest.fixture(scope="module")
def web(stack: Stack, worker: WorkerProcess) -> WebProcess:
    return stack.web()


@pytest.fixture
def jobs(stack: Stack) -> Jobs:
    return Jobs(stack.store, "fake-echo")


@pytest.fixture
def own_jobs(store: JobStore) -> Jobs:
    """For a test with processes of its own."""
    return Jobs(store, "fake-echo")


@contextmanager
def streamed(web: WebProcess, **fields: Any) -> Iterator[tuple[str, Iterator[str]]]:
    """A streamed chat: the id of its job, and its chunks. The connection is closed in the end."""
    with (
        httpx.Client(base_url=web.url, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True} | fields) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        yield answer.headers[HEADER], (line for line in answer.iter_lines() if line.startswith("data:"))


@contextmanager
def plain(web: WebProcess, **fields: Any) -> Iterator[socket.socket]:
    """A chat that waits for its whole answer."""
    body = json.dumps(CHAT | fields).encode()
    host, port = web.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield connection


def newest(jobs: Jobs, status: str) -> JobRecord:
    """The newest job, once it has a status."""

    def found() -> JobRecord | None:
        record = next(jobs.store.newest(), None)
        return record if record is not None and record.status == status else None

    return eventually(found, f"a job is {status}")


def freed(worker: WorkerProcess, jobs: Jobs, job_id: str) -> dict[str, Any]:
    """The object of a cancelled job whose slot serves the next one."""
    jobs.until_recorded(job_id, "canceled")
    job = jobs.store.view(job_id)
    assert (job["status"], job["finish_reason"]) == ("cancelled", "cancelled")
    assert jobs.until(jobs.submit(max_tokens=3), "completed")["usage"]["completion_tokens"] == 3
    eventually(lambda: worker.stats.active_slots == 0, "no slot is taken")
    return job


def test_a_stream_that_is_dropped_frees_its_slot(web: WebProcess, worker: WorkerProcess, jobs: Jobs) -> None:
    with streamed(web) as (job_id, chunks):
        for _ in range(3):
            next(chunks)
    job = freed(worker, jobs, job_id)
    assert len(jobs.store.stream.tokens(job_id)) < 400  # a tenth of a second, and what busy cores need
    assert job["text"].startswith("1 2"[: len(job["text"])])


def test_a_plain_call_that_is_dropped_frees_its_slot(web: WebProcess, worker: WorkerProcess, jobs: Jobs) -> None:
    with plain(web):
        job_id = newest(jobs, "running").id
        jobs.until_tokens(job_id, 3)
        seen = len(jobs.store.stream.tokens(job_id))
    freed(worker, jobs, job_id)
    assert len(jobs.store.stream.tokens(job_id)) < seen + 400


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_call_that_is_dropped_while_it_waits_never_gets_a_slot(
    start_worker: StartWorker, start_web: StartWeb, own_jobs: Jobs, stream: bool
) -> None:
    worker, web = start_worker(**SLOW, n_parallel=1, n_ctx=1024), start_web()
    blocker = own_jobs.submit("block", max_tokens=900, priority="interactive")
    own_jobs.until(blocker, "running")
    with plain(web, stream=stream):
        job_id = newest(own_jobs, "queued").id
    job = own_jobs.until(job_id, "cancelled")
    assert (job["attempts"], job["usage"], job["started_at"]) == (0, None, None)
    own_jobs.store.cancel(blocker)
    last = own_jobs.until(own_jobs.submit("last", max_tokens=3), "completed")
    evaluated = len("block") + last["usage"]["prompt_tokens"] - last["usage"]["cached_tokens"]
    eventually(lambda: worker.stats.prompt_tokens_total >= evaluated, "the figures are there")
    assert worker.stats.prompt_tokens_total == evaluated


def test_a_call_that_is_dropped_in_prefill_makes_no_token(
    start_worker: StartWorker, start_web: StartWeb, own_jobs: Jobs
) -> None:
    worker = start_worker(**SLOW, n_parallel=1, n_ctx=2048, n_batch=8)
    web = start_web()
    with plain(web, messages=[{"role": "user", "content": "x" * 1900}], max_tokens=3):
        job_id = newest(own_jobs, "running").id
    freed(worker, own_jobs, job_id)
    assert own_jobs.store.stream.tokens(job_id) == []


def test_every_choice_of_a_call_ends_with_it(start_worker: StartWorker, start_web: StartWeb, own_jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=2, n_ctx=2048)
    with streamed(start_web(), n=3) as (job_ids, chunks):
        for _ in range(5):
            next(chunks)
    ids = job_ids.split(", ")
    assert [own_jobs.until(job_id, "cancelled")["parent"] for job_id in ids] == [ids[0].partition("-")[0]] * 3
    eventually(lambda: worker.stats.active_slots == 0, "no slot is taken")


def test_a_killed_web_process_leaves_no_job_running_for_nobody(stack: Stack, worker: WorkerProcess, jobs: Jobs) -> None:
    web = stack.web(bound_lease_s=2)
    with streamed(web) as (job_id, chunks), plain(web):
        next(chunks)
        jobs.until(job_id, "running")
        waiting = newest(jobs, "queued").id
        web.kill()
        freed(worker, jobs, job_id)
        assert jobs.until(waiting, "cancelled")["attempts"] <= 1


def test_a_web_process_that_lives_keeps_its_calls_beyond_the_lease(
    stack: Stack, worker: WorkerProcess, jobs: Jobs
) -> None:
    with streamed(stack.web(bound_lease_s=2), max_tokens=250) as (job_id, chunks):  # five seconds
        assert list(chunks)[-1] == "data: [DONE]"
    assert jobs.until(job_id, "completed")["usage"]["completion_tokens"] == 250


def test_a_web_process_that_is_stopped_cancels_its_calls_and_says_so(
    stack: Stack, worker: WorkerProcess, jobs: Jobs
) -> None:
    web = stack.web()
    with streamed(web) as (job_id, chunks):
        next(chunks)
        assert web.stop() == 0
        *_, last = chunks
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    freed(worker, jobs, job_id)


def test_a_job_in_the_background_goes_on_and_can_be_read_to_its_end(
    web: WebProcess, worker: WorkerProcess, jobs: Jobs
) -> None:
    with streamed(web, background=True, max_tokens=60) as (job_id, chunks):
        next(chunks)
    job = jobs.until(job_id, "completed")
    assert job["usage"]["completion_tokens"] == 60
    events = httpx.get(f"{web.url}/v1/jobs/{job_id}/events").text
    assert events.count("event: token\n") == 60 and "event: done\n" in events
