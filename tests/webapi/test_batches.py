"""Batches over HTTP; the test itself is the process that runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from openai.types import Batch

from shared.batches.records import Usage
from shared.batches.schemas import BatchObject
from shared.batches.store import Part
from tests.webapi.conftest import MakeApp
from webapi.services import Services, services_of


@pytest.fixture
def http(make_app: MakeApp, tmp_path: Path) -> FlaskClient:
    return make_app(files_url=str(tmp_path)).test_client()


@pytest.fixture
def given(http: FlaskClient) -> Services:
    return services_of(http.application)


@pytest.fixture
def file(given: Services) -> str:
    with given.files.upload() as upload:
        upload.write(b"{}\n" * 3)
    return given.files.register(upload, "in.jsonl").id


def create(http: FlaskClient, file: str, **fields: Any) -> dict[str, Any]:
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"} | fields
    answer = http.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.json
    batch: dict[str, Any] = answer.json
    return batch


def runs(given: Services, batch: str, total: int = 3) -> int:
    """Take a batch up and start it; the fence."""
    fence = given.batches.acquire(batch, "runner", 60)
    assert fence is not None
    given.batches.start(batch, fence, total, "tiny")
    return fence


def commits(given: Services, batch: str, fence: int, which: Any, *numbers: int) -> None:
    name = f"batches/{batch}/{numbers[0]}.{which}.jsonl"
    data = b"{}\n" * len(numbers)
    given.files.put(name, data)
    given.batches.commit_part(batch, fence, [Part(which, name, numbers, len(data))], Usage(4, 2))


def test_a_new_batch_is_answered_in_the_shape_of_openais(http: FlaskClient, file: str) -> None:
    shown = create(http, file, metadata={"team": "blue"})
    ours, theirs = BatchObject.model_validate(shown), Batch.model_validate(shown)
    assert (ours.status, ours.paused, ours.model, ours.usage) == ("validating", False, None, None)
    assert (theirs.endpoint, theirs.input_file_id) == ("/v1/chat/completions", file)
    assert (theirs.metadata, theirs.expires_at) == ({"team": "blue"}, theirs.created_at + 86_400)
    assert set(Batch.model_fields) <= set(shown)
    assert http.get(f"/v1/batches/{shown['id']}").json == shown


def test_a_repeated_key_means_the_same_batch_and_with_another_body_it_is_409(http: FlaskClient, file: str) -> None:
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    key = {"Idempotency-Key": "night run 7"}
    first = http.post("/v1/batches", json=body, headers=key).json
    assert http.post("/v1/batches", json=body, headers=key).json == first
    assert [batch["id"] for batch in http.get("/v1/batches").json["data"]] == [first["id"]]
    other = http.post("/v1/batches", json=body | {"completion_window": "7d"}, headers=key)
    assert (other.status_code, other.json["error"]["code"]) == (409, "id_conflict")
    assert http.post("/v1/batches", json=body, headers={"Idempotency-Key": "é"}).status_code == 400


def test_a_batch_is_seen_through_all_its_states(http: FlaskClient, given: Services, file: str) -> None:
    batch = create(http, file)["id"]
    path = f"/v1/batches/{batch}"
    fence = runs(given, batch)
    commits(given, batch, fence, "output", 1, 3)
    running = http.get(path).json
    assert (running["status"], running["model"]) == ("in_progress", "tiny")
    assert running["request_counts"] == {"total": 3, "completed": 2, "failed": 0}
    assert running["usage"]["total_tokens"] == 6
    assert running["error_file_id"] is None
    commits(given, batch, fence, "error", 2)
    given.batches.finalize(batch, fence)
    assert http.get(path).json["status"] == "finalizing"
    given.batches.finish(batch, fence, "completed")
    ended = Batch.model_validate(http.get(path).json)
    assert (ended.status, ended.error_file_id is None) == ("completed", False)
    assert None not in (ended.in_progress_at, ended.finalizing_at, ended.completed_at)


def test_a_bad_input_is_told_by_the_batch(http: FlaskClient, given: Services, file: str) -> None:
    batch = create(http, file)["id"]
    fence = given.batches.acquire(batch, "runner", 60) or 0
    errors = [{"code": "empty_file", "line": None, "message": "there is no line in it", "param": None}]
    given.batches.fail_validation(batch, fence, errors)
    shown = http.get(f"/v1/batches/{batch}").json
    found = Batch.model_validate(shown)
    assert found.status == "failed"
    assert found.errors is not None
    assert found.errors.data is not None
    assert (found.errors.data[0].code, found.errors.data[0].line) == ("empty_file", None)
    assert BatchObject.model_validate(shown).errors is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"endpoint": "/v1/jobs"}, "endpoint"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"priority": "normal"}, "priority"),
    ],
)
def test_a_bad_field_is_refused_by_name(
    http: FlaskClient, given: Services, file: str, fields: dict[str, Any], param: str
) -> None:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    answer = http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, param)
    assert given.batches.open_batches() == []


def test_an_unknown_input_file_is_404(http: FlaskClient, file: str) -> None:
    body = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "file_not_found")
    assert answer.json["error"]["param"] == "input_file_id"


def test_results_are_no_input(http: FlaskClient, given: Services, file: str) -> None:
    batch = create(http, file)["id"]
    fence = runs(given, batch)
    commits(given, batch, fence, "output", 1)
    output = http.get(f"/v1/batches/{batch}").json["output_file_id"]
    body = {"input_file_id": output, "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "input_file_id")


def test_the_results_can_have_a_time_of_their_own(http: FlaskClient, given: Services, file: str) -> None:
    batch = create(http, file, output_expires_after={"anchor": "created_at", "seconds": 7200})["id"]
    commits(given, batch, runs(given, batch), "output", 1)
    output = http.get(f"/v1/files/{http.get(f'/v1/batches/{batch}').json['output_file_id']}").json
    assert output["expires_at"] == output["created_at"] + 7200


def test_batches_are_listed_page_by_page(http: FlaskClient, file: str) -> None:
    made = {create(http, file)["id"] for _ in range(5)}
    whole = http.get("/v1/batches").json
    order = [batch["id"] for batch in whole["data"]]
    assert (set(order), whole["has_more"]) == (made, False)
    first = http.get("/v1/batches?limit=2").json
    assert (first["first_id"], first["last_id"], first["has_more"]) == (order[0], order[1], True)
    rest = http.get(f"/v1/batches?limit=3&after={order[1]}").json
    assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == (order[2:], False)


@pytest.mark.parametrize(("query", "param"), [("limit=0", "limit"), ("limit=101", "limit"), ("after=no", "after")])
def test_a_bad_list_is_refused_by_name(http: FlaskClient, query: str, param: str) -> None:
    answer = http.get(f"/v1/batches?{query}")
    assert (answer.status_code, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("batch", ["batch_none", "x:lease", "%20", "a" * 500])
@pytest.mark.parametrize(
    ("method", "suffix"), [("GET", ""), *(("POST", f"/{verb}") for verb in ("cancel", "pause", "resume", "retry"))]
)
def test_an_unknown_batch_is_404_everywhere(http: FlaskClient, batch: str, method: str, suffix: str) -> None:
    answer = http.open(f"/v1/batches/{batch}{suffix}", method=method)
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "batch_not_found")


def test_a_cancelled_batch_is_cancelling_until_its_runner_is_through(
    http: FlaskClient, given: Services, file: str
) -> None:
    batch = create(http, file)["id"]
    fence = runs(given, batch, 1)
    first = http.post(f"/v1/batches/{batch}/cancel")
    assert (first.status_code, first.json["status"]) == (200, "cancelling")
    assert Batch.model_validate(first.json).cancelling_at is not None
    assert http.post(f"/v1/batches/{batch}/cancel").json == first.json
    commits(given, batch, fence, "error", 1)
    given.batches.finish(batch, fence, "cancelled")
    ended = http.get(f"/v1/batches/{batch}").json
    assert (ended["status"], ended["request_counts"]["failed"]) == ("cancelled", 1)
    again = http.post(f"/v1/batches/{batch}/cancel")
    assert (again.status_code, again.json) == (200, ended)


def test_what_the_state_does_not_allow_is_409(http: FlaskClient, given: Services, file: str) -> None:
    batch = create(http, file)["id"]
    fence = runs(given, batch, 0)
    assert http.post(f"/v1/batches/{batch}/retry").status_code == 409
    given.batches.finish(batch, fence, "completed")
    for verb in ("cancel", "pause", "resume", "retry"):
        answer = http.post(f"/v1/batches/{batch}/{verb}")
        assert (answer.status_code, answer.json["error"]["code"]) == (409, "batch_state")


def test_a_batch_can_be_paused_and_resumed(http: FlaskClient, file: str) -> None:
    path = f"/v1/batches/{create(http, file)['id']}"
    assert http.post(f"{path}/pause").json["paused"] is True
    assert http.get(path).json["paused"] is True
    assert http.post(f"{path}/resume").json["paused"] is False


def test_failed_lines_can_be_run_again(http: FlaskClient, given: Services, file: str) -> None:
    batch = create(http, file)["id"]
    fence = runs(given, batch, 3)
    commits(given, batch, fence, "output", 1)
    commits(given, batch, fence, "error", 2, 3)
    given.batches.finish(batch, fence, "expired")
    error = http.get(f"/v1/batches/{batch}").json["error_file_id"]
    again = http.post(f"/v1/batches/{batch}/retry")
    assert (again.status_code, again.json["status"], again.json["error_file_id"]) == (200, "in_progress", None)
    assert again.json["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
    assert http.get(f"/v1/files/{error}").status_code == 404
    assert [b.id for b in given.batches.open_batches()] == [batch]


def test_the_input_of_an_open_batch_is_kept(http: FlaskClient, given: Services, file: str) -> None:
    batch = create(http, file)["id"]
    answer = http.delete(f"/v1/files/{file}")
    assert (answer.status_code, answer.json["error"]["param"]) == (409, "file_id")
    given.batches.finish(batch, runs(given, batch, 0), "completed")
    assert http.delete(f"/v1/files/{file}").status_code == 200
