from __future__ import annotations

from typing import Any

import pytest
import redis
from flask.testing import FlaskClient

from shared.names import file_key
from tests.processes import eventually
from tests.receiver import Receiver
from tests.webapi.conftest import MakeApp, ScriptedWorker

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
URL = "https://example.com/hook"
JOB = {"prompt": "hello"}
BATCH = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}
SUBMITS: list[tuple[str, dict[str, Any]]] = [("/v1/jobs", JOB), ("/v1/batches", BATCH)]


@pytest.fixture
def signing(make_app: MakeApp, worker: ScriptedWorker) -> FlaskClient:
    """An app that sends webhooks to public addresses."""
    return make_app(webhook_secret=SECRET).test_client()


@pytest.fixture
def input_file(client: redis.Redis) -> None:
    client.hset(file_key("file-1"), mapping={"purpose": "batch"})


def refused(http: FlaskClient, path: str, body: dict[str, Any], url: Any) -> str:
    """Submit with a bad URL; what the refusal says."""
    answer = http.post(path, json=body | {"webhook_url": url})
    assert answer.status_code == 400, answer.text
    assert answer.json["error"]["param"] == "webhook_url"
    return str(answer.json["error"]["message"])


@pytest.mark.parametrize(("path", "body"), SUBMITS)
@pytest.mark.parametrize(
    ("url", "why"),
    [
        (7, "string"),
        ("", "at least 1 character"),
        ("hook", "http://"),
        ("ftp://example.com", "http://"),
        ("https://me:word@example.com", "user name"),
        ("http://127.0.0.1/", "not a public address (SLOTLINE_WEBHOOK_ALLOW_PRIVATE)"),
        ("http://[::ffff:10.0.0.1]/", "not a public address"),
        ("http://169.254.169.254/latest/meta-data", "not a public address"),
        ("http://2130706433/", "not a public address"),
        ("http://localhost:8000/", "this machine"),
    ],
)
def test_a_url_that_nothing_could_be_sent_to_is_refused_and_nothing_queued(
    signing: FlaskClient, client: redis.Redis, path: str, body: dict[str, Any], url: Any, why: str
) -> None:
    assert why in refused(signing, path, body, url)
    assert not client.exists("slotline:jobs", "slotline:batches")


@pytest.mark.parametrize(("path", "body"), SUBMITS)
def test_without_a_secret_every_url_is_refused(
    http: FlaskClient, worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    assert "SLOTLINE_WEBHOOK_SECRET" in refused(http, path, body, URL)


def test_private_addresses_are_taken_where_the_setting_allows_them(make_app: MakeApp, worker: ScriptedWorker) -> None:
    http = make_app(webhook_secret=SECRET, webhook_allow_private=True).test_client()
    assert http.post("/v1/jobs", json=JOB | {"webhook_url": "http://localhost/"}).status_code == 202


def test_rqs_own_webhooks_are_not_offered(signing: FlaskClient) -> None:
    answer = signing.post("/v1/jobs", json=JOB | {"webhooks": [{"url": URL}]})
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "webhooks")


def test_a_job_shows_its_webhook_from_the_start(signing: FlaskClient) -> None:
    job = signing.post("/v1/jobs", json=JOB | {"webhook_url": URL}).json
    assert job["webhook"] == {
        "url": URL,
        "id": None,
        "status": "pending",
        "attempts": [],
        "next_attempt_at": None,
    }
    assert signing.post("/v1/jobs", json=JOB).json["webhook"] is None


def test_the_url_is_part_of_what_an_idempotency_key_stands_for(signing: FlaskClient, input_file: None) -> None:
    for path, body in SUBMITS:
        for url, status in ((URL, (200, 202)), (URL, (200, 202)), (URL + "2", (409,)), (None, (409,))):
            headers = {"Idempotency-Key": path}
            assert signing.post(path, json=body | {"webhook_url": url}, headers=headers).status_code in status


def test_a_batch_shows_its_webhook(signing: FlaskClient, input_file: None) -> None:
    batch = signing.post("/v1/batches", json=BATCH | {"webhook_url": URL}).json
    assert (batch["webhook"]["url"], batch["webhook"]["status"]) == (URL, "pending")
    assert signing.post("/v1/batches", json=BATCH).json["webhook"] is None


def test_the_job_and_the_list_show_the_attempts(make_app: MakeApp, worker: ScriptedWorker) -> None:
    http = make_app(webhook_secret=SECRET, webhook_allow_private=True, webhook_backoff_s=0.01).test_client()
    with Receiver(503, 200) as receiver:
        job_id = http.post("/v1/jobs", json=JOB | {"webhook_url": receiver.url}).json["id"]
        worker.run_all(["a"])
        look = f"/v1/jobs/{job_id}"
        eventually(lambda: http.get(look).json["webhook"]["status"] == "delivered", "it is delivered")
        shown = http.get(look).json["webhook"]
        assert [attempt["status"] for attempt in shown["attempts"]] == [503, 200]
        assert http.get("/v1/jobs").json["data"][0]["webhook"] == shown
        assert [got.json["data"]["text"] for got in receiver.got] == ["a", "a"]


def test_webhooks_are_in_the_openapi_document(http: FlaskClient) -> None:
    spec = http.get("/openapi.json").json
    assert set(spec["webhooks"]) == {"job.ended", "batch.ended"}
    for name, model, types in (
        ("job.ended", "JobWebhook", {"job.completed", "job.failed", "job.cancelled"}),
        ("batch.ended", "BatchWebhook", {"batch.completed", "batch.failed", "batch.cancelled", "batch.expired"}),
    ):
        sent = spec["webhooks"][name]["post"]
        assert sent["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{model}")
        assert set(spec["components"]["schemas"][model]["properties"]["type"]["enum"]) == types
        assert {p["name"] for p in sent["parameters"]} == {"webhook-id", "webhook-timestamp", "webhook-signature"}
    assert "webhook_url" in spec["components"]["schemas"]["JobRequest"]["properties"]
    assert "webhook_url" in spec["components"]["schemas"]["BatchRequest"]["properties"]
