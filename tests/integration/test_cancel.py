"""Cancelling over HTTP and with RQ's own tools, wherever a job is: real web and worker processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rq import Queue
from rq.job import Job

from shared.names import SERIALIZER, queue_name
from tests.integration.conftest import Jobs, Stack
from tests.processes import WebProcess, WorkerProcess, eventually

pytestmark = pytest.mark.integration

#: Ten milliseconds a tick, and an answer that goes on for as long as it is let.
SLOW = {"model": "fake:count:0.01", "name": "fake-echo"}
LONG = {"prompt": "count", "max_tokens": 3000, "temperature": 0}


@pytest.fixture(scope="module")
def worker(stack: Stack) -> WorkerProcess:
    """One slot, and prompts that take a tick for every eight tokens. Each test leaves the slot free."""
    return stack.worker(**SLOW, n_parallel=1, n_ctx=4096, n_batch=8)


@pytest.fixture(scope="module")
def web(stack: Stack, worker: WorkerProcess) -> WebProcess:
    return stack.web(keep_alive_s=1)


@pytest.fixture
def http(web: WebProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=web.url, timeout=30) as client:
        yield client


@pytest.fixture
def jobs(stack: Stack) -> Jobs:
    return Jobs(stack.store, "fake-echo")


def submit(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/v1/jobs", json=LONG | body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def cancel(http: httpx.Client, job_id: str) -> dict[str, Any]:
    answer = http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    assert job["status"] == "cancelled"
    return job


def serves_the_next(worker: WorkerProcess, jobs: Jobs) -> None:
    job = jobs.until(jobs.submit(max_tokens=3), "completed")
    assert job["usage"]["completion_tokens"] == 3
    eventually(lambda: worker.stats.active_slots == 0, "no slot is taken")


class Reader:
    """Reads the events of a job on a thread of its own until they end; the stream is open once it is made."""

    def __init__(self, web: WebProcess, job_id: str) -> None:
        self.names: list[str] = []
        self.last: dict[str, Any] = {}
        self._url = f"{web.url}/v1/jobs/{job_id}/events"
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._open.wait(timeout=60), "the stream does not open"

    def _read(self) -> None:
        with httpx.stream("GET", self._url, timeout=60) as answer:
            self._open.set()
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    self.names.append(line.removeprefix("event: "))
                elif line.startswith("data: "):
                    self.last = json.loads(line.removeprefix("data: "))

    def ended(self) -> dict[str, Any]:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), f"the stream goes on after {self.names[-3:]}"
        return self.last


def test_between_the_chunks_of_a_long_prompt(http: httpx.Client, worker: WorkerProcess, jobs: Jobs) -> None:
    before = worker.stats.prompt_tokens_total
    job_id = submit(http, prompt="x" * 3900, max_tokens=3)
    jobs.until(job_id, "running")
    cancel(http, job_id)
    jobs.until_recorded(job_id, "canceled")
    assert jobs.store.stream.tokens(job_id) == []
    serves_the_next(worker, jobs)
    assert worker.stats.prompt_tokens_total - before < 3900


def test_while_it_waits_behind_another_and_twice(
    http: httpx.Client, worker: WorkerProcess, web: WebProcess, jobs: Jobs
) -> None:
    blocker = submit(http)
    jobs.until(blocker, "running")
    waiting = submit(http)
    reader = Reader(web, waiting)
    first = cancel(http, waiting)
    assert cancel(http, waiting) == first
    assert (first["attempts"], first["started_at"], first["text"]) == (0, None, None)
    assert reader.ended()["status"] == "cancelled"
    jobs.until_tokens(blocker, 3)
    cancel(http, blocker)
    cancel(http, blocker)
    jobs.until_recorded(blocker, "canceled")
    assert http.get(f"/v1/jobs/{blocker}").json()["text"].startswith("1 2")
    serves_the_next(worker, jobs)


def test_before_its_time_has_come(http: httpx.Client, web: WebProcess, jobs: Jobs) -> None:
    job_id = submit(http, delay_s=3600)
    reader = Reader(web, job_id)
    assert cancel(http, job_id)["detail"] == "canceled"
    assert reader.ended()["status"] == "cancelled" and reader.names[-1] == "done"


def test_while_another_has_taken_its_slot(
    http: httpx.Client, worker: WorkerProcess, web: WebProcess, jobs: Jobs
) -> None:
    displaced = submit(http, priority="batch")
    jobs.until_tokens(displaced, 5)
    urgent = submit(http, priority="interactive")
    jobs.until_tokens(urgent, 1)
    reader = Reader(web, displaced)
    cancel(http, displaced)
    jobs.until_recorded(displaced, "canceled")
    job = http.get(f"/v1/jobs/{displaced}").json()
    assert job["text"].startswith("1 2") and reader.ended()["text"] == job["text"]
    assert jobs.status(urgent) == "running"
    cancel(http, urgent)
    serves_the_next(worker, jobs)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_what_never_was_and_what_is_over(http: httpx.Client, jobs: Jobs, method: str) -> None:
    def asked(job_id: str) -> httpx.Response:
        return http.request(method, f"/v1/jobs/{job_id}" + ("/cancel" if method == "POST" else ""))

    assert asked("nobody").status_code == 404
    job_id = submit(http, max_tokens=2)
    jobs.until(job_id, "completed")
    assert asked(job_id).status_code == 409
    assert jobs.status(job_id) == "completed"


@pytest.mark.parametrize("how", ["cancel", "delete", "empty"])
def test_with_rqs_own_tools_streams_and_slots_end_too(
    how: str, http: httpx.Client, worker: WorkerProcess, web: WebProcess, stack: Stack, jobs: Jobs
) -> None:
    running = submit(http)
    jobs.until_tokens(running, 3)
    waiting = submit(http)
    dependent = submit(http, depends_on=waiting)
    readers = [Reader(web, job_id) for job_id in (running, waiting)]
    if how == "empty":
        Queue(queue_name("fake-echo", "normal"), connection=stack.client, serializer=SERIALIZER).empty()
        cancel(http, running)
    else:
        for job_id in (running, waiting):
            getattr(Job.fetch(job_id, connection=stack.client, serializer=SERIALIZER), how)()
    for reader in readers:
        assert reader.ended()["status"] in ("cancelled", "failed")
        assert reader.names[-1] in ("done", "failed")
    assert jobs.until(dependent, "cancelled")["error"]["code"] == "dependency_failed"
    serves_the_next(worker, jobs)
    for job_id in (running, waiting):
        for key in (f"rq:job:{job_id}", f"slotline:events:{job_id}"):
            eventually(lambda key=key: stack.client.ttl(key) != -1, f"{key} is not kept for ever")  # type: ignore[misc]
