"""What cannot be served is refused or fails by itself, and everything else is served as before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from rq import Queue

from shared.names import JOB_FUNCTION, SERIALIZER, queue_name
from tests.integration.conftest import Jobs, Stack
from tests.processes import WebProcess, WorkerProcess

pytestmark = pytest.mark.integration

#: What all slots share, and one request may have for itself.
N_CTX = 1024


@pytest.fixture(scope="module")
def worker(stack: Stack) -> WorkerProcess:
    return stack.worker(model="fake:count:0.005", name="fake-echo", n_parallel=4, n_ctx=N_CTX)


@pytest.fixture(scope="module")
def web(stack: Stack, worker: WorkerProcess) -> WebProcess:
    return stack.web()


@pytest.fixture
def http(web: WebProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=web.url, timeout=30) as client:
        yield client


@pytest.fixture
def jobs(stack: Stack) -> Jobs:
    return Jobs(stack.store, "fake-echo")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", {"prompt": ""}),
        ("/v1/jobs", {"prompt": []}),
        ("/v1/jobs", {"messages": []}),
        ("/v1/jobs", {"messages": user("")}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": user("")}),
    ],
)
def test_an_empty_prompt_is_refused_and_the_next_job_is_served(
    path: str, body: dict[str, Any], http: httpx.Client, jobs: Jobs
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert jobs.until(jobs.submit(max_tokens=3), "completed")["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("length", [2 * N_CTX, 8 * N_CTX])
def test_a_prompt_beyond_the_context_harms_no_running_job(
    length: int, http: httpx.Client, stack: Stack, jobs: Jobs
) -> None:
    running = [jobs.submit(f"job {i}", max_tokens=300) for i in range(3)]
    for job_id in running:
        jobs.until(job_id, "running")
    refused = http.post("/v1/jobs", json={"prompt": "x" * length})
    queue = Queue(queue_name("fake-echo", "normal"), connection=stack.client, serializer=SERIALIZER)
    unchecked = queue.enqueue(JOB_FUNCTION, {"prompt": "x" * length}).id
    errors = [jobs.until(unchecked, "failed")["error"]]
    if refused.status_code == 400:
        errors.append(refused.json()["error"])
    else:  # nobody was asked, so its worker refuses it
        errors.append(jobs.until(refused.json()["id"], "failed")["error"])
    for error in errors:
        assert error["code"] == "context_length_exceeded"
        assert f"{length} tokens" in error["message"] and str(N_CTX) in error["message"]
    texts = {jobs.until(job_id, "completed")["text"] for job_id in running}
    assert len(texts) == 1 and texts.pop().startswith("1 2 3 ")


def test_one_id_is_one_run_however_often_and_at_once_it_is_submitted(
    http: httpx.Client, web: WebProcess, jobs: Jobs
) -> None:
    body = {"id": "mine", "prompt": "count", "max_tokens": 50}

    def post(changes: dict[str, Any]) -> int:
        with httpx.Client(base_url=web.url, timeout=30) as client:
            return client.post("/v1/jobs", json=body | changes).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(post, [{}] * 8)) == {202}
    assert post({"max_tokens": 51}) == 409
    job = jobs.until("mine", "completed")
    assert post({}) == 202 and post({"prompt": "other"}) == 409
    assert (job["attempts"], job["usage"]["completion_tokens"]) == (1, 50)
    assert [e.name for e in jobs.store.stream.replay("mine")].count("started") == 1
    assert jobs.store.view("mine") == job
