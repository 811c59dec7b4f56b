from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import redis

from shared.connection import connect
from shared.errors import JobAlreadyEnded
from shared.names import held_key, web_lease_key
from shared.registry import Registry
from shared.schemas import JobRequest
from shared.settings import Settings, load
from tests.integration.conftest import Jobs, StartWorker
from tests.processes import WorkerProcess, eventually, new_valkey
from tests.proxy import RedisProxy

pytestmark = pytest.mark.integration

#: Ten milliseconds a tick, and an answer that goes on for as long as it is let.
SLOW = {"model": "fake:count:0.01", "name": "fake-echo"}


def test_sixteen_jobs_share_eight_slots_and_all_finish(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=8)
    ids = [jobs.submit(f"job {i}", max_tokens=200) for i in range(16)]
    eventually(lambda: worker.stats.active_slots == 8, "eight slots are active")
    assert worker.stats.idle_slots == 0 and worker.stats.queue_depth <= 8
    for job_id in ids:
        assert jobs.until(job_id, "completed")["usage"]["completion_tokens"] == 200


def test_texts_of_neighbours_equal_those_generated_alone(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(model="fake:babble", name="fake-echo", n_parallel=8)
    bodies = [{"prompt": f"prompt {i}", "temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 40} for i in range(16)]
    together = [jobs.submit(**body) for body in bodies]
    texts = [jobs.until(job_id, "completed")["text"] for job_id in together]
    for body, text in zip(bodies, texts, strict=True):
        assert jobs.until(jobs.submit(**body), "completed")["text"] == text


def test_a_worker_takes_no_more_jobs_than_it_has_slots(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    first = start_worker(**SLOW, n_parallel=4)
    long = [jobs.submit(max_tokens=2000, prompt=f"long {i}") for i in range(6)]
    eventually(lambda: client.llen(held_key(first.name)) == 4, "the first worker is full")
    second = start_worker(**SLOW, n_parallel=4)
    short = [jobs.submit(max_tokens=3, prompt=f"short {i}") for i in range(2)]
    for job_id in short:
        assert jobs.until(job_id, "completed")["attempts"] == 1
    assert client.llen(held_key(first.name)) == 4
    eventually(lambda: client.llen(held_key(second.name)) == 2, "the second holds the two long ones that were left")
    for job_id in long:
        jobs.store.cancel(job_id)


def test_urgent_jobs_are_taken_first(start_worker: StartWorker, jobs: Jobs) -> None:
    ids = {p: jobs.submit(priority=p, prompt=p, max_tokens=3) for p in ("batch", "normal", "interactive")}
    start_worker(n_parallel=1)
    started = {p: jobs.until(job_id, "completed")["started_at"] for p, job_id in ids.items()}
    assert started["interactive"] < started["normal"] < started["batch"]


def test_a_cancelled_job_leaves_its_slot_and_stays_cancelled(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=1)
    job_id = jobs.submit(max_tokens=5000)
    jobs.until_tokens(job_id, 3)
    assert jobs.store.cancel(job_id)["status"] == "cancelled"
    after = jobs.submit(max_tokens=2)
    jobs.until(after, "completed")
    jobs.until_recorded(job_id, "canceled")
    view = jobs.store.view(job_id)
    assert view["finish_reason"] == "cancelled" and view["text"].startswith("1 2 ")
    assert worker.stats.active_slots == 0 or worker.process.poll() is None


def test_a_cancel_around_the_start_is_never_overtaken(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(n_parallel=2)
    for _ in range(50):
        ids = [jobs.submit(f"job {i}", max_tokens=3) for i in range(5)]
        expected = dict.fromkeys(ids, "finished")
        for job_id in ids:
            with suppress(JobAlreadyEnded):
                jobs.store.cancel(job_id)
                expected[job_id] = "canceled"
        for job_id, status in expected.items():
            jobs.until_recorded(job_id, status)
            assert jobs.status(job_id) == ("cancelled" if status == "canceled" else "completed")


def test_sigterm_lets_running_jobs_finish_and_ends_with_zero(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=1)
    job_id = jobs.submit(max_tokens=100)
    jobs.until_tokens(job_id)
    waiting = [jobs.submit(f"later {i}", max_tokens=3000) for i in range(3)]
    worker.terminate()
    assert worker.wait() == 0
    assert jobs.status(job_id) == "completed"
    assert jobs.store.fetch(job_id).rq_status == "finished"
    assert [jobs.status(w) for w in waiting] == ["queued"] * 3


def test_what_does_not_finish_in_time_goes_back_to_the_front_and_goes_on(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, n_parallel=2, drain_s=0.3, n_ctx=4096)
    running = [jobs.submit(f"running {i}", max_tokens=300) for i in range(2)]
    for job_id in running:
        jobs.until_tokens(job_id, 5)
    behind = jobs.submit("behind", max_tokens=2)
    worker.terminate()
    assert worker.wait() == 0
    assert [i.decode() for i in client.lrange("rq:queue:fake-echo:normal:default", 0, -1)] == [*running, behind]
    before = {job_id: len(jobs.store.stream.tokens(job_id)) for job_id in running}
    start_worker(model="fake:count", name="fake-echo", n_parallel=2, n_ctx=4096)
    for job_id in running:
        view = jobs.until(job_id, "completed")
        tokens = [t for t in jobs.store.stream.tokens(job_id) if t["token"] is not None]
        assert 5 <= before[job_id] < 300 == len(tokens)
        assert [t["index"] for t in tokens] == list(range(300))
        assert "".join(t["text"] for t in tokens) == view["text"]
        names = [e.name for e in jobs.store.stream.replay(job_id)]
        assert names.count("started") == names.count("resumed") == names.count("done") == 1


def test_a_second_signal_hands_back_at_once(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=1, drain_s=600, n_ctx=100000)
    job_id = jobs.submit(max_tokens=50000)
    jobs.until_tokens(job_id)
    worker.terminate()
    eventually(lambda: worker.stats.draining, "the worker drains")
    worker.terminate()
    assert worker.wait(20) == 0
    assert jobs.status(job_id) == "queued"


def test_jobs_of_a_worker_that_was_killed_go_on_elsewhere(start_worker: StartWorker, jobs: Jobs) -> None:
    dead = start_worker(**SLOW, n_parallel=4, lease_s=1.5, n_ctx=4096)
    ids = [jobs.submit(f"job {i}", max_tokens=200) for i in range(4)]
    for job_id in ids:
        jobs.until_tokens(job_id, 3)
    dead.kill()
    start_worker(model="fake:count", name="fake-echo", n_parallel=4, n_ctx=4096)
    for job_id in ids:
        view = jobs.until(job_id, "completed")
        tokens = [t for t in jobs.store.stream.tokens(job_id) if t["token"] is not None]
        assert [t["index"] for t in tokens] == list(range(200))
        assert view["attempts"] == 2


def test_a_crashed_model_process_is_started_again(start_worker: StartWorker, jobs: Jobs, client: redis.Redis) -> None:
    worker = start_worker(n_parallel=1, lease_s=1)
    os.kill(worker.model_pid, signal.SIGKILL)
    eventually(
        lambda: any(s.worker != worker.name for s in Registry(client).workers()), "a new model process shows itself"
    )
    assert jobs.until(jobs.submit("again", max_tokens=20), "completed")["text"] == "again"
    assert worker.process.poll() is None


def run_worker(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "slotline", "worker", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model=/no/such/file.gguf"], "/no/such/file.gguf"),
        (["--model=fake:echo", "--n-batch=2", "--n-parallel=4"], "n_batch 2 is below n_parallel 4"),
        (["--model=fake:echo", "--n-ctx=64", "--n-parallel=16"], "n_ctx 64 is too small for 16 slots"),
        (["--model=fake:echo", "--batch-strategy=fastest"], "fastest"),
        (["--model=fake:nonsense"], "nonsense"),
        (["--model=fake:echo", "--n-ctx=abc"], "--n-ctx"),
        ([], "SLOTLINE_MODEL_PATH"),
    ],
)
def test_a_bad_configuration_is_one_line_and_status_two(flags: list[str], says: str, valkey: str) -> None:
    result = run_worker(*flags, SLOTLINE_REDIS_URL=valkey)
    assert result.returncode == 2
    assert says in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_model_file_that_is_none_is_one_line_and_status_two(content: bytes, valkey: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    result = run_worker(f"--model={path}", SLOTLINE_REDIS_URL=valkey)
    assert result.returncode == 2
    assert str(path) in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_redis_that_is_not_there_is_one_line_and_status_69() -> None:
    result = run_worker("--model=fake:echo", SLOTLINE_REDIS_URL="redis://127.0.0.1:1/0", SLOTLINE_REDIS_WAIT_S="0.2")
    assert result.returncode == 69
    assert "127.0.0.1:1" in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_job_of_the_same_id_is_not_hit_by_the_end_of_the_one_before(start_worker: StartWorker, jobs: Jobs) -> None:
    # A tick takes so long that the erased job is still in its slot when its successor is pulled.
    start_worker(model="fake:count:0.4", name="fake-echo", n_parallel=2, temp=0)
    jobs.submit(id="again", max_tokens=400)
    jobs.until_tokens("again", 2)
    jobs.store.erase("again")
    jobs.submit(id="again", max_tokens=3)
    view = jobs.until("again", "completed")
    assert (view["text"], view["attempts"]) == ("1 2", 1)
    jobs.until_recorded("again", "finished")


def test_a_job_that_fails_and_is_retried_at_once_never_gets_stuck(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(n_parallel=2)
    job_id = jobs.submit(grammar='root ::= "no" []')
    for attempt in range(1, 40):
        assert jobs.until(job_id, "failed")["attempts"] == attempt
        jobs.until_recorded(job_id, "failed")
        jobs.store.retry(job_id)
    jobs.until(job_id, "failed")


def test_what_was_pulled_by_a_command_whose_reply_was_lost_is_run_all_the_same(
    jobs: Jobs, client: redis.Redis, valkey: str, tmp_path: Path
) -> None:
    with RedisProxy(valkey) as proxy:
        worker = WorkerProcess(client, proxy.url, tmp_path, name="fake-echo", temp=0)
        try:
            job_id = jobs.submit("lost and found", delay_s=0.01)
            # The pull that takes this job is the first command to name its queue while it is queued.
            client.zrem("rq:scheduled:fake-echo:normal:default", job_id)
            client.hset(f"rq:job:{job_id}", "status", "queued")
            proxy.drop_next_reply_to(b"rq:queue:fake-echo:normal:default")
            client.rpush("rq:queue:fake-echo:normal:default", job_id)
            view = jobs.until(job_id, "completed")
            assert view["text"] == "lost and found"
            assert proxy.dropped == 1
        finally:
            worker.stop()


def submit_for(jobs: Jobs, web: str) -> str:
    """A long job whose caller waits at a web process."""
    request = JobRequest(prompt=f"for {web}", temperature=0, max_tokens=6000)
    return jobs.store.submit(request, jobs.model, bound=web).job_id


def test_a_job_ends_with_the_web_process_it_is_for(start_worker: StartWorker, jobs: Jobs, client: redis.Redis) -> None:
    start_worker(**SLOW, n_parallel=2, lease_s=1.5, n_ctx=40000)
    client.set(web_lease_key("alive"), "1")
    client.set(web_lease_key("dies"), "1")
    running, other = (submit_for(jobs, web) for web in ("dies", "alive"))
    for job_id in (running, other):
        jobs.until_tokens(job_id, 3)
    waiting = submit_for(jobs, "dies")
    client.delete(web_lease_key("dies"))
    for job_id in (running, waiting):
        assert jobs.until(job_id, "cancelled")["finish_reason"] == "cancelled"
        jobs.until_recorded(job_id, "canceled")
    # The one that waited was pulled into the slot that came free, and not one token was computed for it.
    assert [e.name for e in jobs.store.stream.replay(waiting)] == ["done"]
    assert jobs.store.view(waiting)["usage"] is None
    assert jobs.status(other) == "running"
    jobs.store.cancel(other)


def test_a_resumed_job_ends_with_the_logprobs_of_all_its_tokens(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=1, drain_s=0)
    job_id = jobs.submit(max_tokens=200, logprobs=2)
    jobs.until_tokens(job_id, 5)
    worker.terminate()
    assert worker.wait() == 0
    before = len(jobs.store.stream.tokens(job_id))
    start_worker(model="fake:count", name="fake-echo", n_parallel=1)
    view = jobs.until(job_id, "completed")
    events = [t for t in jobs.store.stream.tokens(job_id) if t["token"] is not None]
    assert before < 200 == len(view["logprobs"]) and view["attempts"] == 2
    assert view["logprobs"] == [t["logprobs"] for t in events]
    assert "".join(p["token"] for p in view["logprobs"]) == view["text"]


def test_a_worker_started_with_pooling_makes_embeddings(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(model="fake:echo", name="fake-echo", n_parallel=4, pooling="mean")
    ids = {text: jobs.submit(text, embed=True) for text in ("one", "two", "three", "one more", "five", "six")}
    found = {text: jobs.until(job_id, "completed") for text, job_id in ids.items()}
    vectors = {t: np.frombuffer(base64.b64decode(view["embedding"]), "<f4") for t, view in found.items()}
    assert all(np.linalg.norm(v) == pytest.approx(1, abs=1e-6) for v in vectors.values())
    assert len({v.tobytes() for v in vectors.values()}) == len(vectors)
    assert found["three"]["usage"]["total_tokens"] == found["three"]["usage"]["prompt_tokens"] == 5
    refused = jobs.until(jobs.submit("an answer, please"), "failed")
    assert refused["error"]["code"] == "unsupported_capability"


class RaisingStrategy:
    """A strategy of a user's that has a bug."""

    def plan(self, slots: object, budget: int) -> object:
        raise RuntimeError("a bug in somebody's strategy")


def test_an_engine_that_gives_up_ends_the_process_and_its_jobs_go_on(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    strategy = "tests.integration.test_worker.RaisingStrategy"
    worker = start_worker(name="fake-echo", n_parallel=2, batch_strategy=strategy)
    ids = [jobs.submit(f"job {i}") for i in range(5)]
    eventually(
        lambda: any(s.worker != worker.name for s in Registry(client).workers()), "a fresh model process takes over"
    )
    worker.terminate()
    assert worker.wait() == 0
    for job_id in ids:
        assert jobs.status(job_id) in ("failed", "queued")
        assert jobs.store.fetch(job_id).rq_status in ("failed", "queued")


def test_what_a_parent_that_was_killed_has_started_does_not_stay(
    client: redis.Redis, valkey: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", "slotline", "worker", "--model=fake:echo"]
    parent = subprocess.Popen(command, env={**os.environ, "SLOTLINE_REDIS_URL": valkey}, cwd=tmp_path)
    children = eventually(lambda: psutil.Process(parent.pid).children(), "the model process is started")
    parent.kill()
    parent.wait()
    assert len(children) >= 1
    for child in children:
        eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child ends")  # noqa: B023


def test_a_model_process_whose_parent_and_redis_are_both_gone_ends(tmp_path: Path) -> None:
    server = new_valkey()
    server.start()
    with connect(load(Settings, {"redis_url": server.connection_url})) as own:
        worker = WorkerProcess(own, server.connection_url, tmp_path, drain_s=0)
    model = psutil.Process(worker.model_pid)
    server.stop()
    worker.process.kill()
    worker.process.wait()
    eventually(lambda: not model.is_running() or model.status() == psutil.STATUS_ZOMBIE, "the model process ends")
    assert "the parent process is gone" in worker.log()
