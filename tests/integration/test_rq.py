"""What RQ users rely on, against real RQ, a real server and a real worker process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
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
from rq.worker import BaseWorker

from shared.errors import JobAlreadyEnded
from shared.names import JOB_FUNCTION, SERIALIZER, queue_name
from tests.integration.conftest import Jobs, Stack, StartWorker
from tests.processes import WorkerProcess, eventually, free_port

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Served:
    """A model with its worker, which the tests of this module share."""

    worker: WorkerProcess
    jobs: Jobs
    queue: Queue
    client: redis.Redis


@pytest.fixture(scope="module")
def with_tests_on_path() -> Iterator[None]:
    """RQ's callbacks are named by dotted path; the worker must be able to import this module."""
    with pytest.MonkeyPatch.context() as patch:
        root = str(Path(__file__).parents[2])
        patch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
        yield


def serve(stack: Stack, name: str, **settings: Any) -> Served:
    queue = Queue(queue_name(name, "normal"), connection=stack.client, serializer=SERIALIZER)
    return Served(stack.worker(name=name, temp=0, **settings), Jobs(stack.store, name), queue, stack.client)


@pytest.fixture(scope="module")
def echo(stack: Stack) -> Served:
    """Says its prompt again."""
    return serve(stack, "echo", model="fake:echo")


@pytest.fixture(scope="module")
def counting_worker(stack: Stack, with_tests_on_path: None) -> Served:
    return serve(stack, "count", model="fake:count:0.01", n_ctx=32768)


@pytest.fixture
def count(counting_worker: Served) -> Iterator[Served]:
    """Counts at ten milliseconds a tick, for as long as it is let. What still runs at the end is cancelled."""
    yield counting_worker
    started = StartedJobRegistry(queue=counting_worker.queue)
    for job_id in started.get_job_ids():
        with suppress(JobAlreadyEnded):
            counting_worker.jobs.store.cancel(job_id)
    eventually(lambda: started.count == 0, "no job runs")


def fetch(client: redis.Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=client, serializer=SERIALIZER)


def rq_cli(command: str, url: str, *more: str) -> str:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "rq.cli", command, "--url", url, *more], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_payload_of_any_rq_user_is_generated_and_its_result_read_back(echo: Served) -> None:
    job = echo.queue.enqueue(JOB_FUNCTION, {"prompt": "from rq", "max_tokens": 50})
    eventually(lambda: job.get_status() == "finished", "the job finishes")
    result = fetch(echo.client, job.id).return_value()
    assert result["text"] == "from rq" and result["finish_reason"] == "stop"
    assert job.id in FinishedJobRegistry(queue=echo.queue).get_job_ids()
    assert 86_000 < echo.client.ttl(job.key) <= 86_400


def test_a_payload_that_is_none_fails_that_job_with_a_clear_message(echo: Served) -> None:
    bad = [
        echo.queue.enqueue("os.getcwd"),
        echo.queue.enqueue(JOB_FUNCTION, {"prompt": "x", "unknown": 1}),
        echo.queue.enqueue(JOB_FUNCTION, "just text"),
        echo.queue.enqueue(JOB_FUNCTION, {"prompt": "x", "grammar": "root ::= ("}, retry=Retry(max=3)),
        echo.queue.enqueue(JOB_FUNCTION, {"prompt": "x" * 9000}, retry=Retry(max=3)),
    ]
    codes = [echo.jobs.until(job.id, "failed")["error"]["code"] for job in bad]
    assert codes == ["invalid_request"] * 3 + ["invalid_grammar", "context_length_exceeded"]
    for job in bad:
        echo.jobs.until_recorded(job.id, "failed")
    assert set(FailedJobRegistry(queue=echo.queue).get_job_ids()) == {job.id for job in bad}
    assert 604_400 < echo.client.ttl(bad[0].key) <= 604_800
    assert echo.jobs.until(echo.jobs.submit("still here"), "completed")["text"] == "still here"
    assert echo.worker.process.poll() is None


def test_rq_info_shows_the_worker_and_changes_nothing(count: Served, stack: Stack) -> None:
    job_id = count.jobs.submit(max_tokens=8000)
    count.jobs.until_tokens(job_id)
    for _ in range(3):
        assert count.worker.name in rq_cli("info", stack.url)
    assert count.jobs.status(job_id) == "running"


def test_counting_the_started_registry_abandons_no_job(count: Served) -> None:
    job_id = count.jobs.submit(max_tokens=400)
    count.jobs.until_tokens(job_id)
    assert StartedJobRegistry(queue=count.queue).count == 1
    assert count.jobs.until(job_id, "completed")["attempts"] == 1
    count.jobs.until_recorded(job_id, "finished")
    assert StartedJobRegistry(queue=count.queue).count == 0


def test_rqs_own_worker_listing_reads_our_executions(count: Served) -> None:
    ids = {count.jobs.submit(f"job {i}", max_tokens=8000) for i in range(3)}
    for job_id in ids:
        count.jobs.until_tokens(job_id)
    listed = BaseWorker.all(connection=count.client, serializer=SERIALIZER)
    (seen,) = (worker for worker in listed if worker.name == count.worker.name)
    assert {e.job_id for e in seen.get_current_executions()} == ids


def test_suspend_stops_new_jobs_and_resume_takes_them(count: Served) -> None:
    running = count.jobs.submit(max_tokens=150)
    count.jobs.until_tokens(running)
    suspend(count.client)
    try:
        waiting = count.jobs.submit("waiting", max_tokens=2)
        assert count.jobs.until(running, "completed")
        assert count.jobs.status(waiting) == "queued"
    finally:
        resume(count.client)
    count.jobs.until(waiting, "completed")


def test_job_cancel_frees_the_slot_and_the_job_stays_cancelled(count: Served) -> None:
    job_id = count.jobs.submit(max_tokens=8000)
    count.jobs.until_tokens(job_id, 3)
    fetch(count.client, job_id).cancel()
    eventually(lambda: count.worker.stats.active_slots == 0, "the slot is free")
    assert count.jobs.until(job_id, "cancelled")["finish_reason"] == "cancelled"
    eventually(lambda: count.jobs.store.stream.last(job_id).name == "done", "the stream ends")  # type: ignore[union-attr]
    assert job_id in CanceledJobRegistry(queue=count.queue).get_job_ids()


def test_a_queued_job_that_rq_cancels_never_runs(start_worker: StartWorker, jobs: Jobs, client: redis.Redis) -> None:
    job_id = jobs.submit("never")
    fetch(client, job_id).cancel()
    start_worker(temp=0)
    jobs.until(jobs.submit("other"), "completed")
    assert jobs.store.view(job_id)["status"] == "cancelled"
    assert jobs.store.stream.tokens(job_id) == []


def test_deleting_a_running_job_frees_its_slot(count: Served) -> None:
    job_id = count.jobs.submit(max_tokens=8000)
    count.jobs.until_tokens(job_id)
    fetch(count.client, job_id).delete()
    eventually(lambda: count.worker.stats.active_slots == 0, "the slot is free")
    assert count.jobs.until(count.jobs.submit(max_tokens=2), "completed")
    assert not count.client.exists(f"rq:job:{job_id}")


def test_stop_execution_stops_each_of_two_jobs(count: Served) -> None:
    ids = [count.jobs.submit(f"job {i}", max_tokens=8000) for i in range(2)]
    for job_id in ids:
        count.jobs.until_tokens(job_id)
        (execution,) = fetch(count.client, job_id).get_executions()
        send_stop_execution_command(count.client, job_id, execution.id)
    for job_id in ids:
        count.jobs.until_recorded(job_id, "stopped")
        assert count.jobs.status(job_id) == "cancelled"
        assert count.jobs.store.view(job_id)["text"].startswith("1 ")
        assert job_id in FailedJobRegistry(queue=count.queue).get_job_ids()


def test_the_shutdown_command_drains_the_worker(start_worker: StartWorker, client: redis.Redis) -> None:
    worker = start_worker(temp=0)
    send_shutdown_command(client, worker.name)
    assert worker.wait() == 0


def test_enqueue_in_starts_the_job_later(echo: Served) -> None:
    job = echo.queue.enqueue_in(timedelta(seconds=1), JOB_FUNCTION, {"prompt": "later", "max_tokens": 20})
    assert echo.jobs.status(job.id) == "queued" and echo.jobs.store.view(job.id)["detail"] == "scheduled"
    assert echo.jobs.until(job.id, "completed")["text"] == "later"


def test_delay_s_starts_the_job_later(echo: Served) -> None:
    job_id = echo.jobs.submit("later", delay_s=1.0)
    assert echo.jobs.store.view(job_id)["detail"] == "scheduled"
    view = echo.jobs.until(job_id, "completed")
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


def called(folder: Path, name: str) -> list[Any]:
    eventually(lambda: (folder / name).exists(), f"{name} is called")
    return list(json.loads((folder / name).read_text()))


def test_callbacks_run_with_the_result_the_error_or_the_stop(count: Served, tmp_path: Path) -> None:
    callbacks = {
        "on_success": Callback("tests.integration.test_rq.on_success"),
        "on_failure": Callback("tests.integration.test_rq.on_failure"),
        "on_stopped": Callback("tests.integration.test_rq.on_stopped"),
        "meta": {"folder": str(tmp_path)},
    }
    good = count.queue.enqueue(JOB_FUNCTION, {"prompt": "ok", "max_tokens": 4}, **callbacks)
    assert called(tmp_path, "success") == [good.id, "1 2 "]
    bad = count.queue.enqueue(JOB_FUNCTION, {"prompt": "x" * 40_000}, **callbacks)
    assert called(tmp_path, "failure")[:2] == [bad.id, "ContextLengthExceeded"]
    stopped = count.queue.enqueue(JOB_FUNCTION, {"prompt": "long", "max_tokens": 8000}, **callbacks)
    count.jobs.until_tokens(stopped.id)
    (execution,) = fetch(count.client, stopped.id).get_executions()
    send_stop_execution_command(count.client, stopped.id, execution.id)
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


def test_a_plain_rq_worker_refuses_our_jobs_with_a_message(queue: Queue, client: redis.Redis, valkey: str) -> None:
    job = queue.enqueue(JOB_FUNCTION, {"prompt": "x"})
    plain = ["--worker-class", "rq.worker.SimpleWorker", "--serializer", "rq.serializers.JSONSerializer"]
    rq_cli("worker", valkey, "--burst", *plain, queue.name)
    result = fetch(client, job.id).latest_result()
    assert result is not None and "slotline worker" in (result.exc_string or "")


def test_rq_dashboard_shows_queues_and_jobs(echo: Served, stack: Stack) -> None:
    job_id = echo.jobs.submit("shown")
    echo.jobs.until_recorded(job_id, "finished")
    port = free_port()
    flags = ["--json", "-b", "127.0.0.1", "-p", str(port), "-u", stack.url]
    dashboard = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "rq_dashboard", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        base = f"http://127.0.0.1:{port}/0/data"
        eventually(lambda: answers(f"{base}/queues.json"), "the dashboard answers", 60)
        queues = httpx.get(f"{base}/queues.json").json()["queues"]
        assert echo.queue.name in [q["name"] for q in queues]
        assert httpx.get(f"{base}/job/{job_id}.json").json()["status"] == "finished"
    finally:
        dashboard.terminate()
        dashboard.communicate(timeout=20)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
