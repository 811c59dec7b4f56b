"""Time limits over real processes: what counts, what does not, and who enforces them."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
import redis

from shared.names import job_key
from tests.integration.conftest import Jobs, StartWeb, StartWorker
from tests.processes import eventually

pytestmark = pytest.mark.integration

#: Ten milliseconds a tick, so a hundred tokens a second at the most, however busy the machine.
SLOW = {"model": "fake:count:0.01", "name": "fake-echo"}


def used_ms(client: redis.Redis, job_id: str) -> int:
    return int(client.hget(job_key(job_id), "sl_used_ms") or 0)  # type: ignore[arg-type]


def test_a_time_limit_ends_one_job_and_no_other(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(**SLOW, n_parallel=4)
    slow = jobs.submit(max_tokens=3000, timeout_s=1.0)
    others = [jobs.submit(f"other {i}", max_tokens=200) for i in range(3)]
    job = jobs.until(slow, "failed")
    assert (job["error"]["code"], job["finish_reason"]) == ("timeout", "timeout")
    assert job["text"].startswith("1 2 ") and job["usage"]["completion_tokens"] <= 101
    assert job["timings"]["duration_ms"] >= 1000
    for job_id in others:
        assert jobs.until(job_id, "completed")["usage"]["completion_tokens"] == 200


def test_time_in_slots_adds_up_over_workers_and_time_between_them_does_not_count(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    """Drained twice. Workers that forgot would let it make more than a hundred tokens more."""
    job_id = jobs.submit(max_tokens=3000, timeout_s=4.0)
    for tokens in (60, 120):
        worker = start_worker(**SLOW, n_parallel=1, drain_s=0)
        jobs.until_tokens(job_id, tokens)
        worker.terminate()
        assert worker.wait() == 0
    before = used_ms(client, job_id)
    assert before >= 1200
    start_worker(**SLOW, n_parallel=1)
    job = jobs.until(job_id, "failed")
    assert (job["error"]["code"], job["attempts"]) == ("timeout", 3)
    assert job["usage"]["completion_tokens"] <= 401
    assert job["timings"]["duration_ms"] >= 4000
    names = [e.name for e in jobs.store.stream.replay(job_id)]
    assert (names.count("started"), names.count("resumed")) == (1, 2)


def test_a_killed_worker_takes_little_of_the_time_with_it(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, n_parallel=1, lease_s=1)
    job_id = jobs.submit(max_tokens=3000, timeout_s=3.0)
    eventually(lambda: used_ms(client, job_id) >= 1500, "a second and a half is noted")
    worker.kill()
    noted = used_ms(client, job_id)
    start_worker(**SLOW, n_parallel=1, lease_s=1)
    job = jobs.until(job_id, "failed")
    assert job["error"]["code"] == "timeout"
    tokens = [t["index"] for t in jobs.store.stream.tokens(job_id)]
    assert all(b == a + 1 for a, b in pairwise(tokens))
    # What it did after it had noted it, and what was left by the note. All of it anew would be three hundred.
    assert len(tokens) <= 300 + 150 and used_ms(client, job_id) >= noted


def test_a_job_that_waits_too_long_fails_where_no_worker_has_ever_lived(start_web: StartWeb, jobs: Jobs) -> None:
    web = start_web()
    with httpx.Client(base_url=web.url, timeout=30) as http:
        late = http.post("/v1/jobs", json={"prompt": "x", "queue_timeout_s": 0.5}).json()
        patient = http.post("/v1/jobs", json={"prompt": "x", "queue_timeout_s": 600}).json()
        with http.stream("GET", late["links"]["events"]) as answer:
            lines = list(answer.iter_lines())
        assert "event: failed" in lines and any("queue_timeout" in line for line in lines)
        assert http.get(patient["links"]["self"]).json()["status"] == "queued"


def test_a_job_that_waits_too_long_behind_others_fails_in_time_and_not_when_its_turn_comes(
    start_worker: StartWorker, jobs: Jobs
) -> None:
    start_worker(**SLOW, n_parallel=1)
    blocker = jobs.submit("block", max_tokens=3000)
    jobs.until(blocker, "running")
    late = jobs.submit("late", queue_timeout_s=0.5)
    job = jobs.until(late, "failed")
    assert (job["error"]["code"], job["attempts"], job["started_at"]) == ("queue_timeout", 0, None)
    assert jobs.status(blocker) == "running"
    jobs.store.cancel(blocker)
