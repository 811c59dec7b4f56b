"""What RQ users rely on, against real RQ, a real server and a real worker process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from rq import Callback, Queue, Retry
from rq.command import send_shutdown_command, send_stop_execution_command
from rq.job import Job
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.suspension import resume, suspend
from rq.worker import BaseWorker, SimpleWorker

from shared.names import JOB_FUNCTION, SERIALIZER
from tests.integration.conftest import Jobs, StartWorker
from tests.processes import eventually

pytestmark = pytest.mark.integration

SLOW = {"model": "fake:count:0.01", "name": "fake-echo", "n_ctx": 8192, "temp": 0}


def fetch(client: redis.Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=client, serializer=SERIALIZER)


def rq_cli(command: str, url: str, *more: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "rq.cli", command, "--url", url, *more], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_payload_of_any_rq_user_is_generated_and_its_result_read_back(
    start_worker: StartWorker, queue: Queue, client: redis.Redis
) -> None:
    start_worker(temp=0)
    job = queue.enqueue(JOB_FUNCTION, {"prompt": "from rq", "max_tokens": 50})
    eventually(lambda: job.get_status() == "finished", "the job finishes")
    result = fetch(client, job.id).return_value()
    assert result["text"] == "from rq" and result["finish_reason"] == "stop"
    assert job.id in FinishedJobRegistry(queue=queue).get_job_ids()
    assert 86_300 < client.ttl(job.key) <= 86_400


def test_a_payload_that_is_none_fails_that_job_with_a_clear_message(
    start_worker: StartWorker, queue: Queue, jobs: Jobs
) -> None:
    worker = start_worker(temp=0)
    bad = [
        queue.enqueue("os.getcwd"),
        queue.enqueue(JOB_FUNCTION, {"prompt": "x", "unknown": 1}),
        queue.enqueue(JOB_FUNCTION, "just text"),
        queue.enqueue(JOB_FUNCTION, {"prompt": "x", "grammar": "root ::= ("}, retry=Retry(max=3)),
        queue.enqueue(JOB_FUNCTION, {"prompt": "x" * 9000}, retry=Retry(max=3)),
    ]
    codes = [jobs.until(job.id, "failed")["error"]["code"] for job in bad]
    assert codes == ["invalid_request"] * 3 + ["invalid_grammar", "context_length_exceeded"]
    for job in bad:
        jobs.until_recorded(job.id, "failed")
    assert set(FailedJobRegistry(queue=queue).get_job_ids()) == {job.id for job in bad}
    assert 604_700 < queue.connection.ttl(bad[0].key) <= 604_800
    assert jobs.until(jobs.submit("still here"), "completed")["text"] == "still here"
    assert worker.process.poll() is None


def test_rq_info_shows_the_worker_and_changes_nothing(start_worker: StartWorker, jobs: Jobs, valkey: str) -> None:
    worker = start_worker(**SLOW)
    job_id = jobs.submit(max_tokens=3000)
    jobs.until_tokens(job_id)
    for _ in range(3):
        assert worker.name in rq_cli("info", valkey)
    assert jobs.status(job_id) == "running"
    jobs.store.cancel(job_id)


def test_counting_the_started_registry_abandons_no_job(start_worker: StartWorker, jobs: Jobs, queue: Queue) -> None:
    start_worker(**SLOW)
    job_id = jobs.submit(max_tokens=400)
    jobs.until_tokens(job_id)
    assert StartedJobRegistry(queue=queue).count == 1
    assert jobs.until(job_id, "completed")["attempts"] == 1
    jobs.until_recorded(job_id, "finished")
    assert StartedJobRegistry(queue=queue).count == 0


def test_rqs_own_worker_listing_reads_our_executions(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, n_parallel=3)
    ids = {jobs.submit(f"job {i}", max_tokens=2000) for i in range(3)}
    for job_id in ids:
        jobs.until_tokens(job_id)
    (seen,) = BaseWorker.all(connection=client, serializer=SERIALIZER)
    assert seen.name == worker.name
    assert {e.job_id for e in seen.get_current_executions()} == ids
    for job_id in ids:
        jobs.store.cancel(job_id)


def test_suspend_stops_new_jobs_and_resume_takes_them(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    start_worker(**SLOW)
    running = jobs.submit(max_tokens=150)
    jobs.until_tokens(running)
    suspend(client)
    waiting = jobs.submit("waiting", max_tokens=2)
    assert jobs.until(running, "completed")
    assert jobs.status(waiting) == "queued"
    resume(client)
    jobs.until(waiting, "completed")


def test_job_cancel_frees_the_slot_and_the_job_stays_cancelled(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis, queue: Queue
) -> None:
    worker = start_worker(**SLOW, n_parallel=1)
    job_id = jobs.submit(max_tokens=5000)
    jobs.until_tokens(job_id, 3)
    fetch(client, job_id).cancel()
    eventually(lambda: worker.stats.active_slots == 0, "the slot is free")
    assert jobs.until(job_id, "cancelled")["finish_reason"] == "cancelled"
    eventually(lambda: jobs.store.stream.last(job_id).name == "done", "the stream ends")  # type: ignore[union-attr]
    assert job_id in CanceledJobRegistry(queue=queue).get_job_ids()


def test_a_queued_job_that_rq_cancels_never_runs(start_worker: StartWorker, jobs: Jobs, client: redis.Redis) -> None:
    job_id = jobs.submit("never")
    fetch(client, job_id).cancel()
    start_worker(temp=0)
    jobs.until(jobs.submit("other"), "completed")
    assert jobs.store.view(job_id)["status"] == "cancelled"
    assert jobs.store.stream.tokens(job_id) == []


def test_deleting_a_running_job_frees_its_slot(start_worker: StartWorker, jobs: Jobs, client: redis.Redis) -> None:
    worker = start_worker(**SLOW, n_parallel=1)
    job_id = jobs.submit(max_tokens=5000)
    jobs.until_tokens(job_id)
    fetch(client, job_id).delete()
    eventually(lambda: worker.stats.active_slots == 0, "the slot is free")
    assert jobs.until(jobs.submit(max_tokens=2), "completed")
    assert not client.exists(f"rq:job:{job_id}")


def test_stop_execution_stops_each_of_two_jobs(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis, queue: Queue
) -> None:
    start_worker(**SLOW, n_parallel=2)
    ids = [jobs.submit(f"job {i}", max_tokens=5000) for i in range(2)]
    for job_id in ids:
        jobs.until_tokens(job_id)
        (execution,) = fetch(client, job_id).get_executions()
        send_stop_execution_command(client, job_id, execution.id)
    for job_id in ids:
        jobs.until_recorded(job_id, "stopped")
        assert jobs.status(job_id) == "cancelled"
        assert jobs.store.view(job_id)["text"].startswith("1 ")
        assert job_id in FailedJobRegistry(queue=queue).get_job_ids()


def test_the_shutdown_command_drains_the_worker(start_worker: StartWorker, client: redis.Redis) -> None:
    worker = start_worker(temp=0)
    send_shutdown_command(client, worker.name)
    assert worker.wait() == 0


def test_enqueue_in_starts_the_job_later(start_worker: StartWorker, jobs: Jobs, queue: Queue) -> None:
    start_worker(temp=0)
    job = queue.enqueue_in(timedelta(seconds=1), JOB_FUNCTION, {"prompt": "later", "max_tokens": 20})
    assert jobs.status(job.id) == "queued" and jobs.store.view(job.id)["detail"] == "scheduled"
    assert jobs.until(job.id, "completed")["text"] == "later"


def test_delay_s_starts_the_job_later(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(temp=0)
    job_id = jobs.submit("later", delay_s=1.0)
    assert jobs.store.view(job_id)["detail"] == "scheduled"
    view = jobs.until(job_id, "completed")
    assert view["started_at"] - view["created_at"] >= 1.0


def test_a_dependent_starts_after_what_it_depends_on(start_worker: StartWorker, jobs: Jobs, queue: Queue) -> None:
    first = jobs.submit("first")
    ours = jobs.submit("ours", depends_on=first)
    theirs = queue.enqueue(JOB_FUNCTION, {"prompt": "theirs"}, depends_on=first)
    assert jobs.store.view(ours)["detail"] == jobs.store.view(theirs.id)["detail"] == "deferred"
    start_worker(temp=0)
    ended = jobs.until(first, "completed")["ended_at"]
    for job_id in (ours, theirs.id):
        assert jobs.until(job_id, "completed")["started_at"] >= ended - 0.01


def note(folder: str, name: str, *details: Any) -> None:
    path = Path(folder) / name
    path.with_suffix(".part").write_text(json.dumps(details))
    path.with_suffix(".part").rename(path)


def on_success(job: Job, connection: redis.Redis, result: Any) -> None:
    note(job.meta["folder"], "success", job.id, result["text"])


def on_failure(job: Job, connection: redis.Redis, kind: type, value: Exception, traceback: Any) -> None:
    note(job.meta["folder"], "failure", job.id, kind.__name__, str(value))


def on_stopped(job: Job, connection: redis.Redis) -> None:
    note(job.meta["folder"], "stopped", job.id)


def on_success_never_ends(job: Job, connection: redis.Redis, result: Any) -> None:
    while True:
        note(job.meta["folder"], "began", job.id)


@pytest.fixture
def with_tests_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """RQ's callbacks are named by dotted path; the worker must be able to import this module."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )


def called(folder: Path, name: str) -> list[Any]:
    eventually(lambda: (folder / name).exists(), f"{name} is called")
    return list(json.loads((folder / name).read_text()))


@pytest.mark.usefixtures("with_tests_on_path")
def test_callbacks_run_with_the_result_the_error_or_the_stop(
    start_worker: StartWorker, queue: Queue, client: redis.Redis, jobs: Jobs, tmp_path: Path
) -> None:
    start_worker(**SLOW)
    callbacks = {
        "on_success": Callback("tests.integration.test_rq.on_success"),
        "on_failure": Callback("tests.integration.test_rq.on_failure"),
        "on_stopped": Callback("tests.integration.test_rq.on_stopped"),
        "meta": {"folder": str(tmp_path)},
    }
    good = queue.enqueue(JOB_FUNCTION, {"prompt": "ok", "max_tokens": 4}, **callbacks)
    assert called(tmp_path, "success") == [good.id, "1 2 "]
    bad = queue.enqueue(JOB_FUNCTION, {"prompt": "x" * 9000}, **callbacks)
    assert called(tmp_path, "failure")[:2] == [bad.id, "ContextLengthExceeded"]
    stopped = queue.enqueue(JOB_FUNCTION, {"prompt": "long", "max_tokens": 4000}, **callbacks)
    jobs.until_tokens(stopped.id)
    (execution,) = fetch(client, stopped.id).get_executions()
    send_stop_execution_command(client, stopped.id, execution.id)
    assert called(tmp_path, "stopped") == [stopped.id]


@pytest.mark.usefixtures("with_tests_on_path")
def test_a_callback_that_never_ends_holds_nothing_up(
    start_worker: StartWorker, queue: Queue, jobs: Jobs, tmp_path: Path
) -> None:
    worker = start_worker(temp=0)
    job = queue.enqueue(
        JOB_FUNCTION,
        {"prompt": "x"},
        on_success=Callback("tests.integration.test_rq.on_success_never_ends", timeout=2),
        meta={"folder": str(tmp_path)},
    )
    assert called(tmp_path, "began") == [job.id]
    assert jobs.until(jobs.submit("quick"), "completed")["text"] == "quick"
    assert jobs.status(job.id) == "completed"
    worker.terminate()
    assert worker.wait() == 0


def test_a_plain_rq_worker_refuses_our_jobs_with_a_message(queue: Queue, client: redis.Redis) -> None:
    job = queue.enqueue(JOB_FUNCTION, {"prompt": "x"})
    SimpleWorker([queue], connection=client, serializer=SERIALIZER).work(burst=True)
    result = fetch(client, job.id).latest_result()
    assert result is not None and "slotline worker" in (result.exc_string or "")


def test_rq_dashboard_shows_queues_and_jobs(start_worker: StartWorker, jobs: Jobs, valkey: str) -> None:
    start_worker(temp=0)
    job_id = jobs.submit("shown")
    jobs.until_recorded(job_id, "finished")
    port = free_port()
    flags = ["--json", "-b", "127.0.0.1", "-p", str(port), "-u", valkey]
    dashboard = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "rq_dashboard", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        base = f"http://127.0.0.1:{port}/0/data"
        eventually(lambda: answers(f"{base}/queues.json"), "the dashboard answers")
        queues = httpx.get(f"{base}/queues.json").json()["queues"]
        assert "fake-echo:normal:default" in [q["name"] for q in queues]
        assert httpx.get(f"{base}/job/{job_id}.json").json()["status"] == "finished"
    finally:
        dashboard.terminate()
        dashboard.communicate(timeout=20)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
