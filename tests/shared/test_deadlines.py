"""Jobs that wait longer than they may end by themselves, whoever looks first."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from rq.job import Dependency, JobStatus
from rq.registry import FailedJobRegistry, ScheduledJobRegistry
from rq.utils import now, utcformat

from shared.deadlines import Deadlines
from shared.names import DEADLINES, JOB_FUNCTION, events_key, job_key
from shared.results import JobObject
from shared.schemas import JobRequest
from shared.stream import Append
from tests.shared.world import MODEL, NORMAL, World


@pytest.fixture
def deadlines(world: World) -> Deadlines:
    return Deadlines(world.store)


def age(world: World, job_id: str, seconds: float) -> None:
    """Let a job have been queued so long ago, and its deadline come as much sooner."""
    world.client.hset(job_key(job_id), "enqueued_at", utcformat(now() - timedelta(seconds=seconds)))
    bring_forward(world, job_id, seconds)


def bring_forward(world: World, job_id: str, seconds: float) -> None:
    world.client.zincrby(DEADLINES, -seconds, job_id)


def late(world: World, **body: object) -> str:
    job_id = world.submit(queue_timeout_s=10, **body)
    age(world, job_id, 11)
    return job_id


def is_watched(world: World, job_id: str) -> bool:
    return world.client.zscore(DEADLINES, job_id) is not None


def test_a_job_that_waited_too_long_fails_though_no_worker_looks(world: World, deadlines: Deadlines) -> None:
    job_id = late(world)
    assert deadlines.expire() == [job_id]
    shown = world.store.view(job_id)
    JobObject.model_validate_json(json.dumps(shown))
    assert (shown["status"], shown["detail"], shown["error"]["code"]) == ("failed", "failed", "queue_timeout")
    assert (shown["text"], shown["started_at"], shown["attempts"]) == (None, None, 0)
    assert shown["expires_at"] - shown["ended_at"] == pytest.approx(604_800)
    assert world.events(job_id) == ["failed"]
    assert world.pull() == [] and world.waiting() == []
    assert not is_watched(world, job_id)


def test_rq_sees_why_it_failed_and_keeps_it_as_long_as_we_do(world: World, deadlines: Deadlines) -> None:
    job_id = late(world, result_ttl_s=77)
    deadlines.expire()
    job = world.job(job_id)
    assert job.get_status() == JobStatus.FAILED
    assert job_id in FailedJobRegistry(NORMAL, world.client)
    result = job.latest_result()
    assert result is not None and "queue_timeout_s of 10 s" in str(result.exc_string)
    for key in (job_key(job_id), events_key(job_id), f"rq:results:{job_id}"):
        assert 0 < world.client.ttl(key) <= 77, key


def test_one_whose_time_is_not_up_is_left_alone_and_so_is_one_without_a_limit(
    world: World, deadlines: Deadlines
) -> None:
    soon, never = world.submit(queue_timeout_s=10), world.submit()
    age(world, soon, 9)
    assert deadlines.expire() == []
    assert world.waiting() == [soon, never]
    assert is_watched(world, soon) and not is_watched(world, never)


def test_one_that_was_looked_at_too_early_is_looked_at_again_when_it_is_due(world: World, deadlines: Deadlines) -> None:
    job_id = world.submit(queue_timeout_s=10)
    bring_forward(world, job_id, 100)
    assert deadlines.expire() == []
    due = world.client.zscore(DEADLINES, job_id)
    assert due == pytest.approx(world.store.fetch(job_id).enqueued_at + 10, abs=0.01)


def test_a_job_in_hand_is_not_failed_and_its_limit_holds_if_it_comes_back_unbegun(
    world: World, deadlines: Deadlines
) -> None:
    job_id = late(world)
    (pulled,) = world.pull()
    assert deadlines.expire() == []
    assert is_watched(world, job_id)
    world.store.hand_back("w1", [(job_id, pulled.execution)])
    bring_forward(world, job_id, 100)
    assert deadlines.expire() == [job_id]


def test_one_that_has_had_a_slot_has_not_come_too_late(world: World, deadlines: Deadlines) -> None:
    job_id = late(world)
    (pulled,) = world.pull()
    world.store.stream.append([Append(job_id, pulled.execution, "0-*", "started", "{}")])
    world.store.hand_back("w1", [(job_id, pulled.execution)])
    assert deadlines.expire() == []
    assert world.waiting() == [job_id] and not is_watched(world, job_id)


def test_the_time_of_a_delayed_job_runs_from_when_it_was_to_start(world: World, deadlines: Deadlines) -> None:
    job_id = world.submit(queue_timeout_s=10, delay_s=1000)
    registry = ScheduledJobRegistry(NORMAL, connection=world.client)
    bring_forward(world, job_id, 1005)
    assert deadlines.expire() == []
    # It was due, and there was no scheduler to queue it.
    world.client.zincrby(registry.key, -1011, job_id)
    bring_forward(world, job_id, 1011)
    assert deadlines.expire() == [job_id]
    assert job_id not in registry


def test_the_time_of_a_dependent_job_runs_from_when_it_is_queued(world: World, deadlines: Deadlines) -> None:
    first = world.submit()
    second = world.submit(queue_timeout_s=10, depends_on=first)
    bring_forward(world, second, 100)
    assert deadlines.expire() == []
    assert world.client.zscore(DEADLINES, second) == pytest.approx(now().timestamp() + 10, abs=5)
    (pulled,) = world.pull()
    world.end(pulled)
    world.record(pulled, JobStatus.FINISHED)
    world.queue.enqueue_dependents(world.job(first))
    age(world, second, 100)
    assert deadlines.expire() == [second]


def test_a_retried_job_has_all_its_time_again(world: World, deadlines: Deadlines) -> None:
    job_id = late(world)
    deadlines.expire()
    world.store.retry(job_id)
    assert deadlines.expire() == [] and world.waiting() == [job_id]
    age(world, job_id, 11)
    assert deadlines.expire() == [job_id]
    assert world.events(job_id) == ["failed"]


def test_what_has_ended_or_is_gone_is_forgotten(world: World, deadlines: Deadlines) -> None:
    cancelled, deleted, ended = late(world), late(world), late(world)
    world.store.cancel(cancelled)
    world.job(deleted).delete()
    (pulled,) = world.pull()
    assert pulled.record.id == ended
    world.end(pulled)
    assert deadlines.expire() == []
    assert world.client.zcard(DEADLINES) == 0
    assert world.store.view(cancelled)["status"] == "cancelled"


def test_a_promised_cancel_is_kept(world: World, deadlines: Deadlines) -> None:
    job_id = late(world)
    (pulled,) = world.pull()
    world.store.cancel(job_id)
    world.store.hand_back("w1", [(job_id, pulled.execution)])
    assert deadlines.expire() == []
    assert world.store.view(job_id)["status"] == "cancelled"


def test_what_waits_for_it_ends_with_it_or_starts_if_it_does_not_mind(world: World, deadlines: Deadlines) -> None:
    job_id = late(world)
    ours = world.submit(depends_on=job_id)
    theirs = world.queue.enqueue(
        JOB_FUNCTION, {"prompt": "hi"}, depends_on=Dependency(jobs=[world.job(job_id)], allow_failure=True)
    )
    deadlines.expire()
    assert world.store.view(ours)["error"]["code"] == "dependency_failed"
    assert world.waiting() == [theirs.id]


def test_whoever_waits_for_its_end_is_told(world: World, deadlines: Deadlines) -> None:
    job_id = world.store.submit(JobRequest(prompt="hi", queue_timeout_s=10), MODEL, notify="feed").job_id
    age(world, job_id, 11)
    deadlines.expire()
    assert world.client.lrange("feed", 0, -1) == [job_id.encode()]


def test_many_that_look_at_once_fail_a_job_once(world: World, deadlines: Deadlines) -> None:
    ids = {late(world) for _ in range(10)}
    barrier = threading.Barrier(4)

    def look(_: int) -> list[str]:
        barrier.wait(timeout=10)
        return deadlines.expire()

    with ThreadPoolExecutor(4) as pool:
        failed = [job_id for found in pool.map(look, range(4)) for job_id in found]
    assert sorted(failed) == sorted(ids)
    assert all(world.events(job_id) == ["failed"] for job_id in ids)


def test_a_job_never_both_starts_and_fails_for_having_waited(world: World, deadlines: Deadlines) -> None:
    for _ in range(20):
        ids = [late(world) for _ in range(5)]
        barrier = threading.Barrier(2)

        def work(barrier: threading.Barrier = barrier) -> set[str]:
            barrier.wait(timeout=10)
            return {p.record.id for _ in range(5) for p in world.pull()}

        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(work)
            barrier.wait(timeout=10)
            failed = set(deadlines.expire())
            assert not failed & started.result(timeout=30)
        assert failed | started.result() == set(ids)
        for job_id in ids:
            assert world.events(job_id) == (["failed"] if job_id in failed else [])


@pytest.mark.parametrize("change", ["started", "taken", "cancelled", "queued anew"])
def test_what_changes_between_the_look_and_the_end_is_respected(
    change: str, world: World, deadlines: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, expire = late(world), deadlines._expire

    def too_late(keys: list[str], args: list[Any]) -> Any:
        if change == "queued anew":
            world.client.hset(job_key(job_id), "enqueued_at", utcformat(now()))
            return expire(keys=keys, args=args)
        (pulled,) = world.pull()
        if change == "started":
            world.store.stream.append([Append(job_id, pulled.execution, "0-*", "started", "{}")])
        elif change == "cancelled":
            world.client.hset(job_key(job_id), "sl_cancel", "1")
        if change != "taken":
            world.store.hand_back("w1", [(job_id, pulled.execution)])
        return expire(keys=keys, args=args)

    monkeypatch.setattr(deadlines, "_expire", too_late)
    assert deadlines.expire() == []
    assert world.store.fetch(job_id).rq_status == ("started" if change == "taken" else "queued")
    assert "failed" not in world.events(job_id)
