from __future__ import annotations

from flask.testing import FlaskClient

from tests.webapi.conftest import ScriptedWorker
from webapi.stats import Stats


def test_stats_show_workers_waiting_jobs_and_streams(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.report(prefilling_slots=1, queue_depth=2, last_tick_age_s=0.25)
    for priority in ("normal", "normal", "batch"):
        http.post("/v1/jobs", json={"prompt": "hi", "priority": priority})
    job = http.post("/v1/jobs", json={"prompt": "hi", "id": "mine"}).json
    with http.get(job["links"]["events"]):
        found = http.get("/v1/stats").json
    Stats.model_validate(found)
    (shown,) = found["workers"]
    figures = ("active_slots", "idle_slots", "prefilling_slots", "queue_depth", "n_parallel", "n_batch")
    assert [shown[name] for name in figures] == [1, 3, 1, 2, 4, 512]
    assert shown["last_tick_age_s"] == 0.25
    assert "metrics" not in shown
    assert found["models"] == [
        {"model": "tiny", "queue_depth": 4, "by_priority": {"interactive": 0, "normal": 3, "batch": 1}}
    ]
    assert found["streams"] == 1


def test_jobs_that_came_before_any_worker_are_counted_as_default(http: FlaskClient) -> None:
    http.post("/v1/jobs", json={"prompt": "hi"})
    found = http.get("/v1/stats").json
    assert [(m["model"], m["queue_depth"]) for m in found["models"]] == [("default", 1)]
    assert found["workers"] == []
