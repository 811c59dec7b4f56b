from __future__ import annotations

import redis
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

from shared.settings import Settings
from tests.webapi.conftest import MakeApp, ScriptedWorker

METRICS = """\
# HELP slotline_tokens_total Tokens generated.
# TYPE slotline_tokens_total counter
slotline_tokens_total{server="%s"} 5.0
# HELP slotline_ttft_seconds Time to the first token.
# TYPE slotline_ttft_seconds histogram
slotline_ttft_seconds_bucket{le="0.1"} 1.0
slotline_ttft_seconds_bucket{le="+Inf"} 2.0
slotline_ttft_seconds_count 2.0
slotline_ttft_seconds_sum 0.5
"""


def test_healthz_needs_nobody(make_app: MakeApp) -> None:
    answer = make_app(redis_url="redis://127.0.0.1:1").test_client().get("/healthz")
    assert (answer.status_code, answer.json) == (200, {"status": "ok"})


def test_readyz_says_that_redis_is_missing(make_app: MakeApp) -> None:
    answer = make_app(redis_url="redis://127.0.0.1:1").test_client().get("/readyz")
    assert answer.status_code == 503
    assert answer.json["error"]["code"] == "redis_unavailable"


def test_readyz_says_that_no_worker_is_there(http: FlaskClient, worker: ScriptedWorker) -> None:
    assert http.get("/readyz").json["error"]["code"] == "no_worker"
    worker.report(draining=True)
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json["error"]["code"] == "no_worker"


def test_readyz_with_a_worker_gives_the_age_of_its_tick(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.report(last_tick_age_s=0.5)
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json) == (200, {"status": "ready", "workers": 1, "last_tick_age_s": 0.5})


def test_metrics_join_the_web_the_queues_and_all_workers(
    http: FlaskClient, client: redis.Redis, settings: Settings, worker: ScriptedWorker
) -> None:
    worker.report(metrics=METRICS % "w1")
    ScriptedWorker(client, settings, name="w2").report(metrics=METRICS % "w2")
    http.post("/v1/jobs", json={"prompt": "hi"})
    http.get("/nowhere")
    text = http.get("/metrics").text
    described = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(described) == len(set(described))
    samples = {
        (s.name, s.labels.get("server") or s.labels.get("route") or s.labels.get("priority"), s.labels.get("le")): s
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples["slotline_tokens_total", "w1", None].value == 5
    assert samples["slotline_tokens_total", "w2", None].labels["model"] == "tiny"
    assert samples["slotline_ttft_seconds_bucket", "w2", "+Inf"].value == 2
    assert samples["slotline_http_requests_total", "/v1/jobs", None].labels["status"] == "202"
    assert samples["slotline_http_requests_total", "unmatched", None].value == 1
    assert samples["slotline_waiting_jobs", "normal", None].value == 1
    assert samples["slotline_redis_up", None, None].value == 1


def test_metrics_without_redis_are_the_webs_own(make_app: MakeApp) -> None:
    answer = make_app(redis_url="redis://127.0.0.1:1").test_client().get("/metrics")
    assert answer.status_code == 200
    assert "slotline_redis_up 0.0" in answer.text
    assert "slotline_open_streams" in answer.text


def test_metrics_of_a_worker_that_cannot_be_read_hide_no_others(
    http: FlaskClient, client: redis.Redis, settings: Settings, worker: ScriptedWorker
) -> None:
    worker.report(metrics="slotline_tokens_total{ five")
    ScriptedWorker(client, settings, name="w2").report(metrics=METRICS % "w2")
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert 'server="w2"' in answer.text
