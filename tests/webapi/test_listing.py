from __future__ import annotations

from typing import Any

import pytest
import redis
from flask.testing import FlaskClient

from shared.names import job_key
from shared.results import JobList
from tests.webapi.conftest import ScriptedWorker
from webapi import listing


@pytest.fixture
def jobs(http: FlaskClient, worker: ScriptedWorker) -> list[str]:
    """Five jobs, the first completed, the second cancelled; oldest first."""
    ids = [f"job{n}" for n in range(5)]
    for n, job_id in enumerate(ids):
        priority = "batch" if n == 4 else "normal"
        assert http.post("/v1/jobs", json={"prompt": "hi", "id": job_id, "priority": priority}).status_code == 202
    worker.run_all(["text"])
    http.post("/v1/jobs/job1/cancel")
    return ids


def page(http: FlaskClient, query: str = "") -> dict[str, Any]:
    answer = http.get(f"/v1/jobs?{query}")
    assert answer.status_code == 200
    JobList.model_validate_json(answer.data)
    found: dict[str, Any] = answer.json
    return found


def ids_of(found: dict[str, Any]) -> list[str]:
    return [job["id"] for job in found["data"]]


def test_jobs_come_newest_first_and_without_text(http: FlaskClient, jobs: list[str]) -> None:
    found = page(http)
    assert ids_of(found) == jobs[::-1]
    assert (found["has_more"], found["next"]) == (False, None)
    assert {job["text"] for job in found["data"]} == {None}
    assert found["data"][-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("status=queued", [4, 3, 2]),
        ("status=completed", [0]),
        ("status=cancelled", [1]),
        ("status=failed", []),
        ("priority=batch", [4]),
        ("model=tiny", [4, 3, 2, 1, 0]),
        ("model=other", []),
        ("status=queued&priority=normal", [3, 2]),
    ],
)
def test_filters_pick_jobs(http: FlaskClient, jobs: list[str], query: str, numbers: list[int]) -> None:
    assert ids_of(page(http, query)) == [jobs[n] for n in numbers]


def test_an_alias_filters_like_its_name(http: FlaskClient, worker: ScriptedWorker, jobs: list[str]) -> None:
    worker.register(alias="small")
    assert len(ids_of(page(http, "model=small"))) == 5


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_pages_give_every_job_once(http: FlaskClient, jobs: list[str], limit: int) -> None:
    seen: list[str] = []
    query = f"limit={limit}"
    while True:
        found = page(http, query)
        seen += ids_of(found)
        if not found["has_more"]:
            break
        query = f"limit={limit}&after={found['next']}"
    assert seen == jobs[::-1]


def test_a_rare_filter_gives_short_pages_that_go_on(
    http: FlaskClient, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "LOOK_LIMIT", 2)
    first = page(http, "status=completed")
    assert (first["data"], first["has_more"], first["next"]) == ([], True, "job3")
    second = page(http, "status=completed&after=job3")
    third = page(http, f"status=completed&after={second['next']}")
    assert ids_of(third) == ["job0"]


def test_expired_jobs_are_left_out(http: FlaskClient, client: redis.Redis, jobs: list[str]) -> None:
    client.delete(job_key("job3"))
    assert "job3" not in ids_of(page(http))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("status=done", "status"),
        ("priority=high", "priority"),
        ("after=nobody", "after"),
        ("page=2", "page"),
    ],
)
def test_a_bad_query_names_its_parameter(http: FlaskClient, query: str, param: str) -> None:
    answer = http.get(f"/v1/jobs?{query}")
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == param
