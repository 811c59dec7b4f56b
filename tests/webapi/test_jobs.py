from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
from flask.testing import FlaskClient

from shared.jobs import JobStore
from shared.names import JOBS_INDEX, events_key, job_key
from shared.results import JobObject
from tests.processes import eventually
from tests.webapi.conftest import MODEL, MakeApp, ScriptedWorker


def submit(http: FlaskClient, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/jobs", json={"prompt": "hi"} | body)
    assert answer.status_code == 202, answer.json
    job: dict[str, Any] = answer.json
    return job


def test_a_submitted_job_is_answered_with_its_object_and_address(http: FlaskClient, worker: ScriptedWorker) -> None:
    answer = http.post("/v1/jobs", json={"prompt": "hi", "metadata": {"a": [1]}, "priority": "batch"})
    assert answer.status_code == 202
    job = JobObject.model_validate_json(answer.data)
    assert (job.status, job.model, job.priority, job.position) == ("queued", MODEL, "batch", 1)
    assert job.metadata == {"a": [1]}
    assert answer.headers["Location"] == job.links["self"] == f"/v1/jobs/{job.id}"
    assert http.get(job.links["self"]).json == answer.json


def test_a_job_shows_its_text_while_it_runs_and_all_once_it_has_ended(
    http: FlaskClient, worker: ScriptedWorker
) -> None:
    path = submit(http)["links"]["self"]
    job = worker.pull()
    worker.started(job)
    worker.token(job, 0, "one")
    worker.token(job, 1, " two")
    running = http.get(path).json
    assert (running["status"], running["text"], running["position"]) == ("running", "one two", None)
    final = worker.finish(job, "one two", 2)
    ended = http.get(path).json
    assert ended == final
    assert (ended["status"], ended["finish_reason"], ended["seed"]) == ("completed", "length", 5)
    assert ended["expires_at"] > ended["ended_at"]


@pytest.mark.parametrize(
    ("method", "suffix"),
    [
        ("GET", ""),
        ("GET", "/events"),
        ("POST", "/cancel"),
        ("DELETE", ""),
        ("DELETE", "?erase=true"),
        ("POST", "/retry"),
    ],
)
def test_an_unknown_id_is_404_everywhere(http: FlaskClient, method: str, suffix: str) -> None:
    answer = http.open(f"/v1/jobs/nobody{suffix}", method=method)
    assert answer.status_code == 404
    assert answer.json["error"]["code"] == "job_not_found"


def test_the_same_id_and_body_is_the_same_job(http: FlaskClient, store: JobStore) -> None:
    first = submit(http, id="mine", temperature=1)
    again = submit(http, id="mine", temp=1.0)
    assert again == first
    assert len(list(store.newest())) == 1


def test_the_same_id_with_another_body_is_409(http: FlaskClient) -> None:
    submit(http, id="mine")
    answer = http.post("/v1/jobs", json={"prompt": "ho", "id": "mine"})
    assert answer.status_code == 409
    assert answer.json["error"]["code"] == "id_conflict"


def test_submits_of_one_id_at_once_make_one_job(http: FlaskClient, store: JobStore) -> None:
    client = http.application.test_client
    statuses: list[int] = []

    def send() -> None:
        statuses.append(client().post("/v1/jobs", json={"prompt": "hi", "id": "mine"}).status_code)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [202] * 8
    assert len(list(store.newest())) == 1


def test_an_idempotency_key_gives_the_same_job_again_and_another_body_409(http: FlaskClient, store: JobStore) -> None:
    key = {"Idempotency-Key": "key 1"}
    first = http.post("/v1/jobs", json={"prompt": "hi"}, headers=key)
    again = http.post("/v1/jobs", json={"prompt": "hi"}, headers=key)
    other = http.post("/v1/jobs", json={"prompt": "ho"}, headers=key)
    assert first.json["id"] == again.json["id"]
    assert (first.status_code, again.status_code, other.status_code) == (202, 202, 409)
    assert len(list(store.newest())) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "ä"])
def test_a_bad_idempotency_key_is_refused(http: FlaskClient, key: str) -> None:
    answer = http.post("/v1/jobs", json={"prompt": "hi"}, headers={"Idempotency-Key": key})
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "Idempotency-Key"


def test_a_full_queue_is_429_and_tells_when_to_come_back(
    http: FlaskClient, store: JobStore, worker: ScriptedWorker
) -> None:
    worker.register(max_queue=2)
    submit(http, id="a")
    submit(http)
    answer = http.post("/v1/jobs", json={"prompt": "hi"})
    assert answer.status_code == 429
    assert answer.json["error"]["code"] == "queue_full"
    assert int(answer.headers["Retry-After"]) > 0
    assert len(list(store.newest())) == 2
    submit(http, id="a")  # the same job again needs no room


def test_jobs_can_be_delayed_or_made_to_depend(http: FlaskClient) -> None:
    assert submit(http, delay_s=60, id="first")["detail"] == "scheduled"
    assert submit(http, depends_on="first")["detail"] == "deferred"


def test_wait_answers_200_with_the_ended_job(make_app: MakeApp, worker: ScriptedWorker) -> None:
    http = make_app(keep_alive_s=60).test_client()
    answers: list[Any] = []
    waiter = threading.Thread(
        target=lambda: answers.append(http.post("/v1/jobs?wait=30", json={"prompt": "hi", "id": "mine"}))
    )
    waiter.start()
    pulled = _pull_when_there(worker)
    worker.started(pulled)
    worker.token(pulled, 0, "hi")
    final = worker.finish(pulled, "hi", 1)
    waiter.join()
    assert answers[0].status_code == 200
    assert answers[0].json == final
    assert answers[0].headers["Location"] == "/v1/jobs/mine"


def test_wait_answers_202_with_the_state_so_far_when_time_is_up(http: FlaskClient) -> None:
    answer = http.post("/v1/jobs?wait=0.05", json={"prompt": "hi"})
    assert answer.status_code == 202
    assert answer.json["status"] == "queued"


def test_wait_for_a_job_that_has_ended_answers_at_once(http: FlaskClient, worker: ScriptedWorker) -> None:
    submit(http, id="mine")
    final = worker.run_all(["a", "b"])
    answer = http.post("/v1/jobs?wait=60", json={"prompt": "hi", "id": "mine"})
    assert answer.status_code == 200
    assert answer.json == final


def test_wait_sees_a_job_that_rq_itself_removed(http: FlaskClient, client: redis.Redis) -> None:
    submit(http, id="mine")
    client.hset(job_key("mine"), "status", "canceled")
    answer = http.post("/v1/jobs?wait=60", json={"prompt": "hi", "id": "mine"})
    assert answer.status_code == 200
    assert answer.json["status"] == "cancelled"


def test_wait_beyond_the_open_streams_answers_at_once(make_app: MakeApp) -> None:
    http = make_app(max_streams=1).test_client()
    submit(http, id="other")
    stream = http.get("/v1/jobs/other/events")
    answer = http.post("/v1/jobs?wait=60", json={"prompt": "hi"})
    assert answer.status_code == 202
    stream.close()


@pytest.mark.parametrize(("method", "suffix"), [("POST", "/cancel"), ("DELETE", "")])
def test_cancel_ends_a_waiting_job_at_once_and_again_changes_nothing(
    http: FlaskClient, method: str, suffix: str
) -> None:
    path = submit(http)["links"]["self"] + suffix
    answer = http.open(path, method=method)
    assert answer.status_code == 200
    assert (answer.json["status"], answer.json["finish_reason"]) == ("cancelled", "cancelled")
    assert http.open(path, method=method).json == answer.json


def test_cancel_of_a_running_job_shows_at_once_and_keeps_the_text(http: FlaskClient, worker: ScriptedWorker) -> None:
    links = submit(http)["links"]
    job = worker.pull()
    worker.started(job)
    worker.token(job, 0, "so far")
    answer = http.post(links["cancel"])
    assert (answer.json["status"], answer.json["detail"]) == ("cancelled", "cancelling")
    worker.finish(job, "so far", 1, status="cancelled", finish_reason="cancelled")
    ended = http.get(links["self"]).json
    assert (ended["status"], ended["text"]) == ("cancelled", "so far")


@pytest.mark.parametrize(("method", "suffix"), [("POST", "/cancel"), ("DELETE", "")])
def test_cancel_of_a_completed_job_is_409(http: FlaskClient, worker: ScriptedWorker, method: str, suffix: str) -> None:
    path = submit(http)["links"]["self"]
    worker.run_all(["a"])
    answer = http.open(path + suffix, method=method)
    assert answer.status_code == 409
    assert answer.json["error"]["code"] == "job_already_ended"
    assert http.get(path).json["status"] == "completed"


@pytest.mark.parametrize("ended", [False, True])
def test_erase_leaves_no_trace(http: FlaskClient, client: redis.Redis, worker: ScriptedWorker, ended: bool) -> None:
    job = submit(http)
    if ended:
        worker.run_all(["a"])
    answer = http.delete(f"{job['links']['self']}?erase=true")
    assert answer.status_code == 200
    assert answer.json == {"id": job["id"], "object": "job", "deleted": True}
    assert http.get(job["links"]["self"]).status_code == 404
    assert not client.exists(job_key(job["id"]), events_key(job["id"]))
    assert client.zscore(JOBS_INDEX, job["id"]) is None


@pytest.mark.parametrize(("query", "param"), [("erase=maybe", "erase"), ("eras=true", "eras")])
def test_a_bad_erase_is_refused_and_cancels_nothing(http: FlaskClient, query: str, param: str) -> None:
    path = submit(http)["links"]["self"]
    answer = http.delete(f"{path}?{query}")
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == param
    assert http.get(path).json["status"] == "queued"


def test_a_cancelled_job_can_be_retried(http: FlaskClient, worker: ScriptedWorker) -> None:
    job = submit(http)
    http.post(job["links"]["cancel"])
    answer = http.post(f"{job['links']['self']}/retry")
    assert answer.status_code == 202
    assert answer.json["status"] == "queued"
    assert worker.run_all(["a"])["id"] == job["id"]


def test_a_completed_or_waiting_job_cannot_be_retried(http: FlaskClient, worker: ScriptedWorker) -> None:
    path = submit(http)["links"]["self"] + "/retry"
    assert http.post(path).status_code == 409
    worker.run_all(["a"])
    answer = http.post(path)
    assert answer.status_code == 409
    assert answer.json["error"]["code"] == "job_already_ended"


def test_a_failed_job_shows_its_error_and_its_partial_text(http: FlaskClient, worker: ScriptedWorker) -> None:
    path = submit(http)["links"]["self"]
    error = {"message": "took too long", "type": "generation_error", "code": "timeout", "param": None}
    job = worker.pull()
    worker.started(job)
    worker.token(job, 0, "part")
    worker.finish(job, "part", 1, status="failed", finish_reason="timeout", error=error)
    shown = JobObject.model_validate(http.get(path).json)
    assert (shown.status, shown.text, shown.error and shown.error.code) == ("failed", "part", "timeout")


def _pull_when_there(worker: ScriptedWorker) -> Any:
    """The first job, once it is queued; its doorbell rings then."""
    assert worker.store.client.blpop(f"slotline:doorbell:{MODEL}:normal", timeout=10)
    return worker.pull()


def test_a_job_that_waits_too_long_fails_though_no_worker_was_ever_there(
    http: FlaskClient, no_worker: ScriptedWorker
) -> None:
    job = submit(http, queue_timeout_s=0.1)
    ended = eventually(lambda: _ended(http, job["id"]), "its time is up")
    assert (ended["status"], ended["error"]["code"], ended["started_at"]) == ("failed", "queue_timeout", None)
    assert http.post(f"/v1/jobs/{job['id']}/cancel").status_code == 409
    assert no_worker.pull_any() == []


def test_the_reader_of_a_job_that_waits_too_long_is_told(http: FlaskClient, no_worker: ScriptedWorker) -> None:
    job = submit(http, queue_timeout_s=0.1)
    answer = http.get(f"/v1/jobs/{job['id']}/events")
    assert "event: failed" in answer.text and "queue_timeout" in answer.text


def _ended(http: FlaskClient, job_id: str) -> dict[str, Any] | None:
    job: dict[str, Any] = http.get(f"/v1/jobs/{job_id}").json
    return job if job["status"] != "queued" else None
