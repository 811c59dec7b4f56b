"""Dead, stopped and stalled workers, as real processes: what they held goes on, and nobody else is harmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from rq import Queue, Retry

from shared.names import JOB_FUNCTION, WORKERS, held_key, lease_key, queue_name
from shared.registry import Registry
from shared.work import ALONE_AFTER_CRASHES
from tests.integration.conftest import Jobs, StartWorker
from tests.processes import WorkerProcess, eventually

pytestmark = pytest.mark.integration

#: Ten milliseconds a tick, and an answer that goes on for as long as it is let.
SLOW: dict[str, Any] = {"model": "fake:count:0.01", "name": "fake-echo", "n_ctx": 65536}
#: A model that `poison N` in a prompt kills, and `stall N` holds up, at token N.
FRAGILE: dict[str, Any] = {"model": "fake:crash:0.01", "name": "fake-echo", "n_ctx": 65536, "flush_s": 0}

#: Leases that run out soon, and are trusted soon.
QUICK: dict[str, Any] = {"lease_s": 2, "redis_timeout_s": 1}

#: What is promised is 10 s; a busy machine may take longer for reasons of its own.
LIMIT_S = 30.0

Kill = Callable[[WorkerProcess], None]


def text_of(tokens: int) -> str:
    """What the model that counts says in so many tokens."""
    return " ".join(map(str, range(1, tokens)))[:tokens]


def check_whole(jobs: Jobs, job_id: str, tokens: int, *, starts: list[str]) -> None:
    """Every token once and in order, the text of the result, and no events but those."""
    view = jobs.until(job_id, "completed")
    events = list(jobs.store.stream.replay(job_id))
    logged = [e.json() for e in events if e.name == "token" and e.json()["token"] is not None]
    assert [t["index"] for t in logged] == list(range(tokens))
    assert "".join(e.json()["text"] for e in events if e.name == "token") == view["text"] == text_of(tokens)
    assert [e.name for e in events if e.name in ("started", "resumed", "done", "failed")] == [*starts, "done"]


def goes_on(jobs: Jobs, ids: list[str], dead: str) -> float:
    """Wait until none of the jobs is a dead worker's any more; the seconds that it took."""
    began = time.monotonic()

    def moved() -> bool:
        records = [jobs.store.fetch(job_id) for job_id in ids]
        return not any(r.rq_status == "started" and r.worker == dead for r in records)

    eventually(moved, "the jobs of the dead worker go on", LIMIT_S)
    took_s = time.monotonic() - began
    print(f"recovery took {took_s:.2f} s")
    return took_s


@pytest.mark.parametrize(
    ("kill", "other"),
    [
        pytest.param(WorkerProcess.kill, "fake-echo", id="both, beside the same model"),
        pytest.param(WorkerProcess.kill, "another-model", id="both, beside another model"),
        pytest.param(WorkerProcess.kill_model, "fake-echo", id="model process, beside the same model"),
        pytest.param(WorkerProcess.kill_model, None, id="model process, beside nobody"),
    ],
)
def test_jobs_of_a_dead_worker_go_on_within_seconds(
    kill: Kill, other: str | None, start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, **QUICK, n_parallel=2)
    ids = [jobs.submit(f"job {i}", max_tokens=600) for i in range(2)]
    for job_id in ids:
        jobs.until_tokens(job_id, 3)
    if other is not None:
        start_worker(**{**SLOW, **QUICK, "name": other}, n_parallel=2)
    kill(worker)
    goes_on(jobs, ids, worker.name)
    if other == "another-model":
        start_worker(**SLOW, **QUICK, n_parallel=2)
    for job_id in ids:
        check_whole(jobs, job_id, 600, starts=["started", "resumed"])
        assert jobs.store.view(job_id)["attempts"] == 2
    eventually(lambda: worker.name.encode() not in client.smembers(WORKERS), "the dead worker is forgotten")


def test_with_the_default_settings_that_takes_less_than_ten_seconds(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(**{**SLOW, "name": "another-model"}, n_parallel=1)
    time.sleep(7)  # until it has seen Redis well for long enough to trust the leases of others
    worker = start_worker(**SLOW, n_parallel=2)
    ids = [jobs.submit(f"job {i}", max_tokens=5000) for i in range(2)]
    for job_id in ids:
        jobs.until_tokens(job_id, 3)
    worker.kill()
    assert goes_on(jobs, ids, worker.name) < LIMIT_S


def test_the_parent_gives_back_at_once_what_its_model_process_held(start_worker: StartWorker, jobs: Jobs) -> None:
    # So long a lease that nobody waits for it.
    worker = start_worker(**SLOW, n_parallel=2, lease_s=600)
    ids = [jobs.submit(f"job {i}", max_tokens=400) for i in range(2)]
    for job_id in ids:
        jobs.until_tokens(job_id, 3)
    worker.kill_model()
    assert goes_on(jobs, ids, worker.name) < LIMIT_S
    for job_id in ids:
        check_whole(jobs, job_id, 400, starts=["started", "resumed"])


def test_a_parent_takes_over_while_its_own_model_is_not_there(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, n_parallel=1, lease_s=1, redis_timeout_s=0.5)
    watcher = start_worker(**{**SLOW, "name": "another-model"}, n_parallel=1, lease_s=1, redis_timeout_s=0.5)
    job_id = jobs.submit(max_tokens=300)
    jobs.until_tokens(job_id, 3)
    # A model process that is stopped takes over from nobody.
    os.kill(watcher.model_pid, signal.SIGSTOP)
    worker.kill()
    goes_on(jobs, [job_id], worker.name)
    os.kill(watcher.model_pid, signal.SIGCONT)


def test_a_model_process_without_its_parent_finishes_what_it_runs_and_ends(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, n_parallel=1, drain_s=0.5)
    short = jobs.submit(max_tokens=5)
    jobs.until(short, "completed")
    running = jobs.submit(max_tokens=1000)
    jobs.until_tokens(running, 3)
    worker.kill_parent()
    eventually(lambda: jobs.store.fetch(running).rq_status == "queued", "the job goes back to its queue")
    eventually(lambda: worker.name.encode() not in client.smembers(WORKERS), "the model process has left")
    start_worker(**SLOW, n_parallel=1)
    check_whole(jobs, running, 1000, starts=["started", "resumed"])


def test_jobs_that_were_pulled_but_not_begun_go_on_too(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    # A tick takes so long that what is pulled later has not begun when the worker dies.
    worker = start_worker(model="fake:count:2", name="fake-echo", n_parallel=8, n_ctx=65536)
    first = [jobs.submit(f"first {i}", max_tokens=3) for i in range(4)]
    for job_id in first:
        eventually(lambda: jobs.store.stream.last(job_id), "it has begun")  # noqa: B023
    later = [jobs.submit(f"later {i}", max_tokens=3) for i in range(4)]
    eventually(lambda: client.llen(held_key(worker.name)) == 8, "all are pulled", LIMIT_S)
    worker.kill_model()
    goes_on(jobs, first + later, worker.name)
    for job_id in first + later:
        assert jobs.until(job_id, "completed")["text"] == "1 2"


def test_nothing_is_lost_when_all_workers_are_dead_and_no_retry_is_spent(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis, queue: Queue
) -> None:
    worker = start_worker(**SLOW, n_parallel=3, lease_s=1)
    ids = [jobs.submit(f"job {i}", max_tokens=300) for i in range(5)]
    ids.append(queue.enqueue(JOB_FUNCTION, {"prompt": "by RQ", "max_tokens": 20}, retry=Retry(max=3)).id)
    running = eventually(lambda: [i for i in ids if jobs.status(i) == "running"][2:] and ids[:3], "three run")
    jobs.until_tokens(running[0], 3)
    worker.kill()
    eventually(lambda: not client.exists(lease_key(worker.name)), "the lease has run out")
    time.sleep(3)
    before = {i: jobs.store.fetch(i).rq_status for i in ids}
    info(client)
    assert {i: jobs.store.fetch(i).rq_status for i in ids} == before
    start_worker(**SLOW, n_parallel=3, lease_s=1, redis_timeout_s=1)
    for job_id in ids:
        jobs.until(job_id, "completed")
    assert jobs.store.fetch(ids[-1]).retries_left == 3


def info(client: redis.Redis) -> None:
    """What an operator runs to see how things are; it counts, and counting runs RQ's clean-up."""
    options = client.connection_pool.connection_kwargs
    url = f"redis://{options['host']}:{options['port']}/0"
    command = [sys.executable, "-m", "rq.cli", "info", "-u", url, "--serializer", "rq.serializers.JSONSerializer"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert queue_name("fake-echo", "normal") in found.stdout


def test_a_worker_that_wakes_up_after_a_takeover_writes_nothing(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    sleeper = start_worker(**SLOW, n_parallel=2, lease_s=1)
    ids = [jobs.submit(f"job {i}", max_tokens=500) for i in range(2)]
    for job_id in ids:
        jobs.until_tokens(job_id, 3)
    sleeper.send(signal.SIGSTOP)
    try:
        start_worker(**SLOW, n_parallel=2, lease_s=1, redis_timeout_s=1)
        goes_on(jobs, ids, sleeper.name)
        for job_id in ids:
            eventually(lambda: jobs.store.fetch(job_id).attempts == 2, "it has its next owner")  # noqa: B023
    finally:
        sleeper.send(signal.SIGCONT)
    for job_id in ids:
        check_whole(jobs, job_id, 500, starts=["started", "resumed"])
        assert jobs.store.view(job_id)["attempts"] == 2
    eventually(lambda: not client.exists(held_key(sleeper.name)), "the one that woke up holds nothing")
    assert "another owner now" in sleeper.log()


def test_a_tick_longer_than_the_lease_is_no_death(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(model="fake:count:2.5", name="fake-echo", n_parallel=1, lease_s=0.9)
    start_worker(**{**SLOW, "name": "another-model"}, lease_s=0.9, redis_timeout_s=1)
    job_id = jobs.submit(max_tokens=4)
    check_whole(jobs, job_id, 4, starts=["started"])
    assert jobs.store.view(job_id)["attempts"] == 1


@pytest.mark.parametrize("at", [0, 5], ids=["in its prompt", "after five tokens"])
def test_a_job_that_kills_its_process_fails_and_its_neighbours_finish(
    at: int, start_worker: StartWorker, jobs: Jobs
) -> None:
    start_worker(**FRAGILE, n_parallel=4, drain_s=0.5)
    neighbours = [jobs.submit(f"neighbour {i}", max_tokens=400) for i in range(3)]
    for job_id in neighbours:
        jobs.until_tokens(job_id, 3)
    poison = jobs.submit(f"poison {at}", max_tokens=400)
    behind = [jobs.submit(f"behind {i}", max_tokens=50) for i in range(3)]
    view = jobs.until(poison, "failed")
    assert view["error"]["code"] == "worker_lost"
    assert "died 3 times" in view["error"]["message"]
    assert view["text"] == text_of(at)
    for job_id in neighbours:
        assert jobs.until(job_id, "completed")["text"] == text_of(400)
    for job_id in behind:
        assert jobs.until(job_id, "completed")["text"] == text_of(50)
    jobs.until_recorded(poison, "failed")


def test_a_job_that_gains_tokens_between_crashes_is_never_failed(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=1)
    job_id = jobs.submit(max_tokens=5000)
    registry = Registry(jobs.store.client)
    for crash in range(1, 4):
        so_far = len(jobs.store.stream.tokens(job_id))
        jobs.until_tokens(job_id, so_far + 3)
        dead = worker.name
        worker.kill_model()
        worker.name = eventually(
            lambda: next((s.worker for s in registry.workers() if s.worker != dead), ""),  # noqa: B023
            "the next model process shows itself",
        )
        assert jobs.store.fetch(job_id).crashes == 0, f"after crash {crash}"
    jobs.store.cancel(job_id)


def test_a_model_process_that_stands_still_is_replaced(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=1, stall_timeout_s=1.5, lease_s=2)
    job_id = jobs.submit(max_tokens=400)
    jobs.until_tokens(job_id, 3)
    os.kill(worker.model_pid, signal.SIGSTOP)
    check_whole(jobs, job_id, 400, starts=["started", "resumed"])
    assert "has stood still" in worker.log()


def test_a_job_that_holds_up_the_engine_again_and_again_fails(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(**FRAGILE, n_parallel=2, stall_timeout_s=1.5)
    stalling = jobs.submit("stall 0", max_tokens=100)
    assert jobs.until(stalling, "failed")["error"]["code"] == "worker_lost"
    assert jobs.until(jobs.submit("next", max_tokens=20), "completed")["text"] == text_of(20)


def test_a_tick_shorter_than_the_limit_is_no_stall(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(model="fake:count:1", name="fake-echo", n_parallel=1, stall_timeout_s=5)
    job_id = jobs.submit(max_tokens=7)
    check_whole(jobs, job_id, 7, starts=["started"])
    assert jobs.store.view(job_id)["attempts"] == 1 and "stood still" not in worker.log()


def test_a_job_that_waits_to_run_alone_is_handed_back_by_a_worker_that_stops(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, n_parallel=2, drain_s=600)
    neighbour = jobs.submit(max_tokens=20000)
    jobs.until_tokens(neighbour, 3)
    lone = jobs.submit("lone", max_tokens=10, delay_s=1)
    client.hset(f"rq:job:{lone}", "sl_crashes", ALONE_AFTER_CRASHES)
    eventually(lambda: client.llen(held_key(worker.name)) == 2, "it is pulled")
    worker.terminate()
    eventually(lambda: jobs.store.fetch(lone).rq_status == "queued", "it goes back at once")
    assert jobs.store.stream.last(lone) is None
    worker.terminate()
    assert worker.wait() == 0
    start_worker(**SLOW, n_parallel=2, drain_s=0.5)
    assert jobs.until(lone, "completed")["text"] == text_of(10)
    jobs.store.cancel(neighbour)


def test_a_worker_that_died_between_the_pull_and_anything_else_loses_nothing(
    start_worker: StartWorker, jobs: Jobs
) -> None:
    ids = [jobs.submit(f"job {i}", max_tokens=20) for i in range(3)]
    # It had no time to read the reply, nor to renew its lease since it came into being.
    assert len(jobs.store.pull("ghost", [queue_name("fake-echo", "normal")], 2)) == 2
    start_worker(**SLOW, **QUICK, n_parallel=3)
    goes_on(jobs, ids, "ghost")
    for job_id, attempts in zip(ids, (2, 2, 1), strict=True):
        check_whole(jobs, job_id, 20, starts=["started"])
        assert jobs.store.view(job_id)["attempts"] == attempts
