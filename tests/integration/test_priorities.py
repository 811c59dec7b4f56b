"""Urgent jobs overtake in the slots too, age gains order, and tenants share: with real processes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import redis
from rq import Queue
from rq.suspension import resume, suspend
from rq.utils import now, utcformat

from shared.names import JOB_FUNCTION, SERIALIZER, held_key, queue_name, rq_queue_key
from tests.integration.conftest import Jobs, StartWorker
from tests.processes import eventually

pytestmark = pytest.mark.integration

#: Ten milliseconds a tick, with texts that depend on the prompt and on nothing else.
SLOW = {"model": "fake:babble:0.01", "name": "fake-echo", "n_ctx": 32768, "temp": 0}
FAST = {**SLOW, "model": "fake:babble"}


def tokens_of(jobs: Jobs, job_id: str) -> list[dict[str, Any]]:
    return [t for t in jobs.store.stream.tokens(job_id) if t["token"] is not None]


def names_of(jobs: Jobs, job_id: str) -> list[str]:
    return [event.name for event in jobs.store.stream.replay(job_id)]


def check_whole(jobs: Jobs, job_id: str, count: int | None = None) -> str:
    """No index is missing or twice and the tokens make up the text, which is returned."""
    view = jobs.until(job_id, "completed")
    events = jobs.store.stream.tokens(job_id)
    found = [t["index"] for t in events if t["token"] is not None]
    assert found == list(range(len(found))) and (count is None or len(found) == count)
    assert "".join(t["text"] for t in events) == view["text"]
    assert names_of(jobs, job_id).count("started") == names_of(jobs, job_id).count("done") == 1
    return str(view["text"])


def long_job(jobs: Jobs, name: str, priority: str = "batch", max_tokens: int = 400) -> str:
    return jobs.submit(name, priority=priority, max_tokens=max_tokens, ignore_eos=True)


def test_an_interactive_job_overtakes_running_batch_jobs_which_go_on_as_if_nothing_had_been(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(**SLOW, n_parallel=8, pause_s=600)
    batch = [long_job(jobs, f"batch {i}") for i in range(8)]
    for job_id in batch:
        jobs.until_tokens(job_id, 3)
    urgent = jobs.submit("urgent", priority="interactive", max_tokens=30, ignore_eos=True)
    jobs.until_tokens(urgent)
    assert {jobs.status(job_id) for job_id in batch} == {"running"}
    assert client.llen(held_key(worker.name)) == 9
    check_whole(jobs, urgent, 30)
    texts = [check_whole(jobs, job_id, 400) for job_id in batch]
    # One of them had to go, the others did not notice; nobody left the worker.
    (displaced,) = [job_id for job_id in batch if "resumed" in names_of(jobs, job_id)]
    assert [name for name in names_of(jobs, displaced) if name != "token"] == ["started", "paused", "resumed", "done"]
    assert all(jobs.store.view(job_id)["attempts"] == 1 for job_id in batch)
    again = [long_job(jobs, f"batch {i}") for i in range(8)]
    assert [check_whole(jobs, job_id) for job_id in again] == texts


def test_normal_jobs_give_way_to_interactive_ones_and_take_the_place_of_batch_jobs(
    start_worker: StartWorker, jobs: Jobs
) -> None:
    start_worker(**SLOW, n_parallel=2, pause_s=600)
    batch = [long_job(jobs, f"batch {i}") for i in range(2)]
    for job_id in batch:
        jobs.until_tokens(job_id)
    normal = [long_job(jobs, f"normal {i}", "normal", 300) for i in range(2)]
    for job_id in normal:
        jobs.until_tokens(job_id)
    urgent = [long_job(jobs, f"urgent {i}", "interactive", 20) for i in range(2)]
    for job_id in urgent:
        check_whole(jobs, job_id, 20)
    assert {jobs.status(job_id) for job_id in batch + normal} == {"running"}
    ended = {p: [jobs.until(i, "completed")["ended_at"] for i in ids] for p, ids in (("n", normal), ("b", batch))}
    assert max(ended["n"]) < max(ended["b"])
    for job_id in batch + normal:
        check_whole(jobs, job_id)


def test_equals_wait_for_a_free_slot(start_worker: StartWorker, jobs: Jobs) -> None:
    start_worker(**SLOW, n_parallel=1)
    first = long_job(jobs, "first", "interactive", 100)
    jobs.until_tokens(first)
    second = jobs.submit("second", priority="interactive", max_tokens=3)
    assert jobs.until(second, "completed")["started_at"] >= jobs.until(first, "completed")["ended_at"] - 0.01
    assert "resumed" not in names_of(jobs, first)


def test_a_displaced_job_goes_to_the_front_of_its_queue_and_on_with_another_worker(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    first = start_worker(**SLOW, n_parallel=1, pause_s=0.3)
    moved = long_job(jobs, "moved", max_tokens=300)
    jobs.until_tokens(moved, 5)
    behind = jobs.submit("behind", priority="batch", max_tokens=2)
    stays = long_job(jobs, "stays", "interactive", 3000)
    jobs.until(moved, "queued")
    assert client.lrange(rq_queue_key(queue_name("fake-echo", "batch")), 0, -1) == [moved.encode(), behind.encode()]
    eventually(lambda: client.lrange(held_key(first.name), 0, -1) == [stays.encode()], "the first lets go of it")
    before = len(tokens_of(jobs, moved))
    assert 5 <= before < 300
    start_worker(**FAST, n_parallel=1)
    text = check_whole(jobs, moved, 300)
    assert jobs.store.view(moved)["attempts"] == 2 and names_of(jobs, moved).count("resumed") == 1
    assert jobs.until(behind, "completed")["started_at"] >= jobs.store.view(moved)["started_at"]
    # The one that it made room for never stopped.
    assert jobs.status(stays) == "running" and "resumed" not in names_of(jobs, stays)
    jobs.store.cancel(stays)
    assert check_whole(jobs, long_job(jobs, "moved", max_tokens=300)) == text


def test_a_displaced_job_comes_back_to_the_worker_that_gave_it_up_where_there_is_no_other(
    start_worker: StartWorker, jobs: Jobs
) -> None:
    start_worker(**SLOW, n_parallel=1, pause_s=0.1)
    moved = long_job(jobs, "moved", max_tokens=100)
    jobs.until_tokens(moved, 3)
    urgent = long_job(jobs, "urgent", "interactive", 100)
    jobs.until(moved, "queued")
    check_whole(jobs, urgent, 100)
    check_whole(jobs, moved, 100)
    assert jobs.store.view(moved)["attempts"] == 2


@pytest.mark.parametrize("pause_s", [600, 0.1], ids=["paused", "handed back"])
def test_a_displaced_job_can_be_cancelled(start_worker: StartWorker, jobs: Jobs, pause_s: float) -> None:
    worker = start_worker(**SLOW, n_parallel=1, pause_s=pause_s)
    displaced = long_job(jobs, "displaced")
    jobs.until_tokens(displaced, 3)
    urgent = long_job(jobs, "urgent", "interactive", 3000)
    jobs.until_tokens(urgent)
    if pause_s < 1:
        jobs.until(displaced, "queued")
    else:
        eventually(lambda: worker.stats.waiting_requests == 1, "one request waits")
    said = "".join(t["text"] for t in jobs.store.stream.tokens(displaced))
    jobs.store.cancel(displaced)
    jobs.until_recorded(displaced, "canceled")
    view = jobs.store.view(displaced)
    assert view["status"] == view["finish_reason"] == "cancelled" and view["text"].startswith(said) and len(said) > 0
    assert names_of(jobs, displaced).count("done") == 1
    assert jobs.status(urgent) == "running"
    jobs.store.cancel(urgent)
    check_whole(jobs, jobs.submit("after", max_tokens=3))


def test_a_worker_that_drains_gives_displaced_jobs_back_at_once(start_worker: StartWorker, jobs: Jobs) -> None:
    worker = start_worker(**SLOW, n_parallel=1, pause_s=600, drain_s=600)
    displaced = long_job(jobs, "displaced")
    jobs.until_tokens(displaced, 3)
    urgent = long_job(jobs, "urgent", "interactive", 200)
    jobs.until_tokens(urgent)
    worker.terminate()
    jobs.until(displaced, "queued")
    assert jobs.status(urgent) == "running"
    assert worker.wait() == 0
    check_whole(jobs, urgent, 200)
    start_worker(**FAST, n_parallel=1)
    check_whole(jobs, displaced, 400)


def test_displaced_jobs_go_on_when_their_worker_dies(start_worker: StartWorker, jobs: Jobs) -> None:
    dead = start_worker(**SLOW, n_parallel=1, pause_s=600, lease_s=1)
    displaced = long_job(jobs, "displaced")
    jobs.until_tokens(displaced, 3)
    urgent = long_job(jobs, "urgent", "interactive")
    jobs.until_tokens(urgent, 3)
    dead.kill()
    start_worker(**FAST, n_parallel=1, lease_s=1)
    for job_id in (urgent, displaced):
        check_whole(jobs, job_id, 400)
        assert jobs.store.view(job_id)["attempts"] == 2


# --- age ---


def grow_old(client: redis.Redis, job_ids: Iterable[str], seconds: float) -> None:
    for job_id in job_ids:
        client.hset(f"rq:job:{job_id}", "enqueued_at", utcformat(now() - timedelta(seconds=seconds)))


def test_an_old_job_is_taken_before_urgent_ones_that_wait(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    suspend(client)
    old = [jobs.submit(f"old {i}", priority="batch", max_tokens=3) for i in range(3)]
    young = jobs.submit("young", priority="batch", max_tokens=3)
    grow_old(client, old, 1000)
    urgent = [jobs.submit(f"urgent {i}", priority="interactive", max_tokens=3) for i in range(4)]
    start_worker(**SLOW, n_parallel=1, age_s=300)
    resume(client)
    everything = [*old, young, *urgent]
    started = sorted((jobs.until(job_id, "completed")["started_at"], job_id) for job_id in everything)
    order = [job_id for _, job_id in started]
    assert order[:3] == old
    assert order[3:] == [*urgent, young]


def test_an_old_job_gives_way_like_any_other_to_one_that_comes_later(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis
) -> None:
    suspend(client)
    old = [long_job(jobs, f"old {i}", max_tokens=300) for i in range(2)]
    grow_old(client, old, 1000)
    start_worker(**SLOW, n_parallel=2, age_s=300, pause_s=600)
    resume(client)
    for job_id in old:
        jobs.until_tokens(job_id, 3)
    urgent = [jobs.submit(f"urgent {i}", priority="interactive", max_tokens=5, ignore_eos=True) for i in range(2)]
    for job_id in urgent:
        check_whole(jobs, job_id, 5)
    assert {jobs.status(job_id) for job_id in old} == {"running"}
    for job_id in old:
        check_whole(jobs, job_id, 300)


# --- tenants, and jobs that RQ users queue ---


def enqueue(client: redis.Redis, queue: str, count: int, **body: Any) -> list[str]:
    made = Queue(queue, connection=client, serializer=SERIALIZER)
    call = {"temperature": 0, "ignore_eos": True, **body}
    prepared = [Queue.prepare_data(JOB_FUNCTION, args=[{**call, "prompt": f"{queue} {i}"}]) for i in range(count)]
    return [job.id for job in made.enqueue_many(prepared)]


def test_tenants_share_a_worker_by_tokens(start_worker: StartWorker, jobs: Jobs, client: redis.Redis) -> None:
    suspend(client)
    tenants = {
        "long": enqueue(client, "fake-echo:normal:long", 8, max_tokens=800),
        "many": enqueue(client, "fake-echo:normal:many", 10_000, max_tokens=20),
        "few": enqueue(client, "fake-echo:normal:few", 20, max_tokens=100),
    }
    start_worker(model="fake:babble:0.002", name="fake-echo", n_ctx=32768, n_parallel=6)
    resume(client)
    for job_id in tenants["few"]:
        jobs.until(job_id, "completed")
    served = {tenant: count_tokens(client, job_ids) for tenant, job_ids in tenants.items()}
    # Each had about two slots of six. What is in the slots is not counted out to the token.
    assert served["few"] >= 2000
    assert all(1000 <= count <= 4000 for count in served.values()), served


def count_tokens(client: Any, job_ids: list[str]) -> int:
    """About as many tokens as were generated: the events of all logs but for the first."""
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.xlen(f"slotline:events:{job_id}")
    return sum(max(0, length - 1) for length in pipe.execute())


@pytest.mark.parametrize(
    "queue", ["default:normal:default", "default:batch:acme", "fake-echo:interactive:acme", "fake-echo"]
)
def test_jobs_that_rq_users_queue_by_a_models_name_are_served(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis, queue: str
) -> None:
    start_worker(**FAST, n_parallel=1)
    (job_id,) = enqueue(client, queue, 1, max_tokens=3)
    check_whole(jobs, job_id, 3)


def test_a_job_at_the_front_by_rq_is_next(
    start_worker: StartWorker, jobs: Jobs, client: redis.Redis, queue: Queue
) -> None:
    suspend(client)
    later = [jobs.submit(f"later {i}", max_tokens=3) for i in range(3)]
    first = queue.enqueue(JOB_FUNCTION, {"prompt": "first", "max_tokens": 3}, at_front=True).id
    start_worker(**SLOW, n_parallel=1)
    resume(client)
    started = {job_id: jobs.until(job_id, "completed")["started_at"] for job_id in [first, *later]}
    assert sorted(started, key=started.__getitem__) == [first, *later]


def test_while_suspended_nothing_is_displaced(start_worker: StartWorker, jobs: Jobs, client: redis.Redis) -> None:
    start_worker(**SLOW, n_parallel=1)
    batch = long_job(jobs, "batch", max_tokens=100)
    jobs.until_tokens(batch, 3)
    suspend(client)
    urgent = jobs.submit("urgent", priority="interactive", max_tokens=3)
    check_whole(jobs, batch, 100)
    assert jobs.status(urgent) == "queued" and "resumed" not in names_of(jobs, batch)
    resume(client)
    check_whole(jobs, urgent)
