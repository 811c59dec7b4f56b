"""Webhooks of real web, worker and batch processes, received as a user of the `openai` package would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import Stack, StartWeb, StartWorker
from tests.processes import WebProcess, eventually
from tests.receiver import Got, Receiver

pytestmark = pytest.mark.integration

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
#: The receiver is on this machine, and waits are short.
LOCAL = {"webhook_secret": SECRET, "webhook_allow_private": True, "webhook_backoff_s": 0.05}
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


@pytest.fixture(scope="module")
def web(stack: Stack) -> WebProcess:
    stack.worker(name="echo", n_parallel=4)
    stack.service("batches", batch_part_s=0.2)
    return stack.web(**LOCAL)


@pytest.fixture
def http(web: WebProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=web.url, timeout=60) as client:
        yield client


def submitted(http: httpx.Client, url: str, **fields: Any) -> str:
    """The id of a new job with a webhook."""
    answer = http.post("/v1/jobs", json={"prompt": "hello", "temperature": 0, "webhook_url": url} | fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def until_delivered(http: httpx.Client, path: str) -> Any:
    """The object at a path, once its webhook has arrived."""
    eventually(lambda: http.get(path).json()["webhook"]["status"] == "delivered", f"the webhook of {path} arrives")
    return http.get(path).json()


def unwrap(got: Got) -> Any:
    """The event, if its signature is right."""
    with openai.OpenAI(api_key="none", webhook_secret=SECRET) as client:
        return client.webhooks.unwrap(got.body, got.headers)


def test_the_end_of_a_job_arrives_verified(http: httpx.Client) -> None:
    with Receiver() as receiver:
        job_id = submitted(http, f"{receiver.url}/hook")
        job = until_delivered(http, f"/v1/jobs/{job_id}")
        (got,) = receiver.got
    event = unwrap(got)
    assert (event.type, event.id) == ("job.completed", job["webhook"]["id"])
    assert got.json["data"] | {"webhook": None} == job | {"webhook": None}


def test_two_failures_are_followed_by_a_delivery(http: httpx.Client) -> None:
    with Receiver(500, 500, 200) as receiver:
        job_id = submitted(http, receiver.url)
        attempts = until_delivered(http, f"/v1/jobs/{job_id}")["webhook"]["attempts"]
        assert [attempt["status"] for attempt in attempts] == [500, 500, 200]
        assert len({unwrap(got).id for got in receiver.got}) == 1


def test_the_end_of_a_batch_arrives_verified(http: httpx.Client) -> None:
    rows = [{"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": BODY} for n in range(3)]
    data = "\n".join(map(json.dumps, rows)).encode()
    with Receiver(503, 200) as receiver:
        file = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
        batch = http.post(
            "/v1/batches",
            json={
                "input_file_id": file["id"],
                "endpoint": CHAT,
                "completion_window": "24h",
                "webhook_url": receiver.url,
            },
        ).json()
        shown = until_delivered(http, f"/v1/batches/{batch['id']}")
        event = unwrap(receiver.got[-1])
        assert isinstance(event, openai.types.webhooks.BatchCompletedWebhookEvent)
        assert event.data.id == batch["id"]
        assert receiver.got[-1].json["data"]["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert [attempt["status"] for attempt in shown["webhook"]["attempts"]] == [503, 200]


def test_a_receiver_that_hangs_holds_up_nobody(http: httpx.Client) -> None:
    with Receiver() as receiver:
        stuck = [submitted(http, f"{receiver.url}/hang", max_tokens=1) for _ in range(4)]
        eventually(lambda: len(receiver.of("/hang")) >= 4, "they hang")
        job_id = submitted(http, f"{receiver.url}/fast", max_tokens=1)
        assert until_delivered(http, f"/v1/jobs/{job_id}")["status"] == "completed"
        assert http.get("/healthz").status_code == 200
        for job_id in stuck:
            job = http.get(f"/v1/jobs/{job_id}").json()
            assert (job["status"], job["webhook"]["status"]) == ("completed", "pending")


def test_the_time_limit_ends_an_attempt_that_hangs(start_web: StartWeb, start_worker: StartWorker) -> None:
    start_worker(name="echo")
    web = start_web(**LOCAL | {"webhook_timeout_s": 0.3, "webhook_retry_s": 0})
    with httpx.Client(base_url=web.url, timeout=60) as http, Receiver() as receiver:
        path = f"/v1/jobs/{submitted(http, f'{receiver.url}/hang')}"
        eventually(lambda: http.get(path).json()["webhook"]["status"] == "failed", "it is given up")
        assert http.get(path).json()["webhook"]["attempts"][0]["error"] == "no answer within 0.3 seconds"


def test_a_web_process_that_is_killed_while_it_sends_loses_nothing(
    start_web: StartWeb, start_worker: StartWorker, client: Any
) -> None:
    start_worker(name="echo")
    first = start_web(**LOCAL)
    with Receiver() as receiver:
        with httpx.Client(base_url=first.url, timeout=60) as http:
            job_id = submitted(http, f"{receiver.url}/hang")
        eventually(lambda: receiver.got, "it is being sent")
        first.kill()
        (webhook_id,) = client.zrange("slotline:webhooks", 0, -1)
        client.hset(b"slotline:webhook:" + webhook_id, "url", f"{receiver.url}/back")
        client.zadd("slotline:webhooks", {webhook_id: 0})  # its claim has run out
        with httpx.Client(base_url=start_web(**LOCAL).url, timeout=60) as http:
            job = until_delivered(http, f"/v1/jobs/{job_id}")
        assert [got.id for got in receiver.got] == [webhook_id.decode()] * 2
        assert [attempt["status"] for attempt in job["webhook"]["attempts"]] == [200]
