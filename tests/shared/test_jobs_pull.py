"""Pulling: order, what is never taken, and jobs that came by RQ's own ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
from rq import Queue
from rq.executions import Execution
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, ScheduledJobRegistry, StartedJobRegistry
from rq.suspension import resume, suspend

from shared.jobs import request_of
from shared.names import JOB_FUNCTION, SERIALIZER, queue_name, web_lease_key
from shared.schemas import JobRequest
from shared.work import EXECUTION_TTL_S
from tests.shared.world import MODEL, NORMAL, World


def test_several_jobs_are_taken_in_one_call_most_urgent_first(world: World) -> None:
    batch = [world.submit(priority="batch") for _ in range(2)]
    normal = [world.submit() for _ in range(2)]
    interactive = [world.submit(priority="interactive") for _ in range(2)]
    order = [*interactive, *normal, *batch]
    assert [p.record.id for p in world.pull(count=3)] == order[:3]
    assert [p.record.id for p in world.pull(count=9)] == order[3:]
    assert world.held() == order


def test_no_more_are_taken_than_asked_for(world: World) -> None:
    ids = [world.submit() for _ in range(5)]
    assert len(world.pull(count=2)) == 2
    assert world.waiting() == ids[2:]
    assert world.pull(count=0) == []
    assert world.waiting() == ids[2:]


def test_an_empty_queue_gives_nothing_and_keeps_nothing(world: World) -> None:
    assert world.pull() == []
    assert world.held() == []


def test_only_the_queues_named_are_looked_at(world: World) -> None:
    world.submit()
    assert world.pull(queues=[queue_name(MODEL, "batch")]) == []
    assert len(world.pull(queues=[NORMAL])) == 1


def test_a_pulled_job_says_who_runs_it_since_when_and_how_often(world: World) -> None:
    job_id = world.submit()
    (pulled,) = world.pull("w1")
    record = world.store.fetch(job_id)
    assert record == pulled.record
    assert (record.rq_status, record.worker, record.execution, record.attempts) == (
        "started",
        "w1",
        pulled.execution,
        1,
    )
    assert record.enqueued_at is not None
    assert record.started_at is not None
    assert record.started_at >= record.enqueued_at
    job = world.job(job_id)
    assert job.get_status() == JobStatus.STARTED
    assert job.worker_name == "w1"
    assert pulled.raw == world.client.hgetall(f"rq:job:{job_id}")


def test_each_taking_has_an_execution_id_of_its_own(world: World) -> None:
    for _ in range(3):
        world.submit()
    pulled = world.pull(count=3)
    world.store.hand_back("w1", [(p.record.id, p.execution) for p in pulled])
    again = world.pull(count=3)
    assert len({p.execution for p in pulled + again}) == 6
    assert [p.record.attempts for p in again] == [2, 2, 2]


def test_workers_that_pull_at_once_share_the_jobs_out(world: World) -> None:
    ids = {world.submit() for _ in range(60)}
    barrier = Barrier(6)

    def work(name: str) -> list[str]:
        barrier.wait(timeout=10)
        taken: list[str] = []
        while pulled := world.pull(name, count=4):
            taken += [p.record.id for p in pulled]
        return taken

    names = [f"w{i}" for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        taken = dict(zip(names, pool.map(work, names), strict=True))
    assert sorted(i for got in taken.values() for i in got) == sorted(ids)
    assert all(world.held(name) == got for name, got in taken.items())


# --- what is never taken ---


def cancel(world: World, job_id: str) -> None:
    world.store.cancel(job_id)


def cancel_by_rq(world: World, job_id: str) -> None:
    world.job(job_id).cancel()


def delete_by_rq(world: World, job_id: str) -> None:
    world.job(job_id).delete()


def delete_record_only(world: World, job_id: str) -> None:
    world.client.delete(f"rq:job:{job_id}")


def erase(world: World, job_id: str) -> None:
    world.store.erase(job_id)


@pytest.mark.parametrize("away", [cancel, cancel_by_rq, delete_by_rq, delete_record_only, erase])
def test_a_job_taken_away_is_never_pulled(away: Callable[[World, str], None], world: World) -> None:
    gone, stays = world.submit(), world.submit()
    away(world, gone)
    assert [p.record.id for p in world.pull(count=9)] == [stays]
    assert world.held() == [stays]


@pytest.mark.parametrize("away", [cancel, cancel_by_rq, delete_record_only])
def test_an_id_left_behind_on_the_queue_is_only_dropped(away: Callable[[World, str], None], world: World) -> None:
    gone, stays = world.submit(), world.submit()
    away(world, gone)
    world.client.rpush(f"rq:queue:{NORMAL}", gone)
    world.client.lpush(f"rq:queue:{NORMAL}", gone)
    assert [p.record.id for p in world.pull(count=9)] == [stays]
    assert world.waiting() == []
    assert world.held() == [stays]
    assert not world.client.exists(f"rq:job:{gone}") or world.field(gone, "status") == "canceled"


def test_nothing_is_pulled_from_a_queue_that_rq_emptied(world: World) -> None:
    job_id = world.submit()
    world.queue.empty()
    assert world.pull() == []
    assert not world.client.exists(f"rq:job:{job_id}")


def test_an_id_that_is_queued_twice_runs_once(world: World) -> None:
    job_id = world.submit()
    world.client.rpush(f"rq:queue:{NORMAL}", job_id)
    assert len(world.pull("w1", count=9)) == 1
    world.client.rpush(f"rq:queue:{NORMAL}", job_id)
    assert world.pull("w2", count=9) == []


def test_rq_suspend_stops_pulling_and_resume_starts_it_again(world: World) -> None:
    job_id = world.submit()
    suspend(world.client)
    assert world.pull() == []
    assert world.waiting() == [job_id]
    resume(world.client)
    assert [p.record.id for p in world.pull()] == [job_id]


def test_a_job_that_rqs_scheduler_queues_just_after_its_cancel_stays_cancelled(world: World) -> None:
    job_id = world.submit(delay_s=1000)
    read_before = world.job(job_id)
    world.store.cancel(job_id)
    # What `RQScheduler.enqueue_scheduled_jobs` does with jobs it has read.
    with world.client.pipeline() as pipe:
        world.queue._enqueue_job(read_before, pipeline=pipe)
        ScheduledJobRegistry(NORMAL, world.client, serializer=SERIALIZER).remove(job_id, pipeline=pipe)
        pipe.execute()
    assert world.waiting() == [job_id]
    assert world.pull() == []
    assert world.store.view(job_id)["status"] == "cancelled"
    assert world.events(job_id) == ["done"]
    assert world.job(job_id).get_status() == JobStatus.CANCELED


# --- what RQ is told of an execution ---


def what_rq_knows(world: World, job_id: str, execution: str, worker: str) -> dict[str, Any]:
    """Of one execution, without the moments, which differ."""
    client, name = world.client, f"{job_id}:{execution}"
    fields = {k.decode(): v.decode() for k, v in client.hgetall(f"rq:execution:{name}").items()}
    moments = [float(fields.pop(field)) > 1e9 for field in ("created_at", "last_heartbeat")]
    ends = client.zscore(f"rq:wip:{NORMAL}", name), client.zscore(f"rq:executions:{job_id}", execution)
    lasts = client.ttl(f"rq:execution:{name}"), client.ttl(f"rq:executions:{job_id}")
    return {
        "fields": fields,
        "moments": moments,
        "of the job": client.zrange(f"rq:executions:{job_id}", 0, -1),
        "started": client.zrange(f"rq:wip:{NORMAL}", 0, -1),
        "of the worker": client.smembers(f"rq:worker:{worker}:executions"),
        "for a year": [*(end > time.time() + 3e7 for end in ends), *(ttl > 3e7 for ttl in lasts)],
    }


def test_a_pull_registers_an_execution_as_rq_itself_does(world: World) -> None:
    pulled = world.take("w1")
    job_id, execution = pulled.record.id, pulled.execution
    ours = what_rq_knows(world, job_id, execution, "w1")
    assert [e.id for e in world.job(job_id).get_executions()] == [execution]
    world.store.hand_back("w1", [(job_id, execution)])
    with world.client.pipeline() as pipe:
        theirs = Execution.create(world.job(job_id), EXECUTION_TTL_S, pipe, worker_name="w1")
        pipe.execute()
    assert repr(what_rq_knows(world, job_id, theirs.id, "w1")).replace(theirs.id, execution) == repr(ours)
    assert ours["for a year"] == [True] * 4


def test_a_job_that_is_handed_back_is_no_execution_any_more(world: World) -> None:
    pulled = world.take("w1")
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    assert world.job(pulled.record.id).get_executions() == []
    assert StartedJobRegistry(NORMAL, world.client, serializer=SERIALIZER).get_job_ids(cleanup=False) == []
    assert not world.client.keys("rq:execution*") and not world.client.exists("rq:worker:w1:executions")


@pytest.mark.parametrize("lives", [True, False])
def test_a_pull_tells_whether_the_web_process_of_a_job_is_gone(lives: bool, world: World) -> None:
    job_id = world.store.submit(JobRequest(prompt="x"), MODEL, bound="web-1").job_id
    other = world.submit()
    if lives:
        world.client.set(web_lease_key("web-1"), "1")
    assert {p.record.id: p.is_orphaned for p in world.pull(count=2)} == {job_id: not lives, other: False}


# --- RQ's own ways ---


def test_a_job_enqueued_with_rq_alone_is_pulled_and_shown(world: World) -> None:
    job = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}, meta={"user": 1}, result_ttl=77)
    shown = world.store.view(job.id)
    assert (shown["status"], shown["position"], shown["metadata"]) == ("queued", 1, {"user": 1})
    (pulled,) = world.pull()
    assert request_of(pulled.record) == {"prompt": "hi"}
    assert world.say(pulled, "a") == []
    assert world.store.view(job.id)["text"] == "a"
    assert world.end(pulled, tokens=1) == "ok"
    assert world.store.view(job.id)["status"] == "completed"
    assert [record.id for record in world.store.newest()] == [job.id]


@pytest.mark.parametrize("name", ["default", "my-queue", "a:b", "m:urgent:x"])
def test_any_rq_queue_can_be_pulled_from(name: str, world: World) -> None:
    job = Queue(name, connection=world.client, serializer=SERIALIZER).enqueue(JOB_FUNCTION, {"prompt": "hi"})
    (pulled,) = world.pull(queues=[name])
    assert pulled.record.id == job.id
    assert (pulled.record.model, pulled.record.priority) == (name, "normal")


def test_rqs_at_front_is_kept(world: World) -> None:
    last = world.submit()
    first = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}, at_front=True).id
    assert [p.record.id for p in world.pull(count=2)] == [first, last]


def test_a_ttl_of_rq_runs_only_while_the_job_waits(world: World) -> None:
    job = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}, ttl=50)
    assert world.client.ttl(job.key) > 0
    world.pull()
    assert world.client.ttl(job.key) == -1


def test_a_job_whose_ttl_ran_out_while_it_waited_is_dropped(world: World) -> None:
    job = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}, ttl=50)
    world.expire(job.key)
    assert world.pull() == []


def test_rqs_enqueue_in_is_not_pulled_early(world: World) -> None:
    world.queue.enqueue_in(timedelta(seconds=1000), JOB_FUNCTION, {"prompt": "hi"})
    assert world.pull() == []


def ended(world: World, status: Any) -> str:
    pulled = world.take()
    world.say(pulled, "old", "text")
    world.end(pulled, status, tokens=2)
    world.record(pulled, JobStatus.FAILED)
    return pulled.record.id


def test_a_job_requeued_with_rq_runs_from_the_start(world: World) -> None:
    job_id = ended(world, "failed")
    world.job(job_id).requeue()
    shown = world.store.view(job_id)
    assert (shown["status"], shown["position"], shown["ended_at"], shown["error"]) == ("queued", 1, None, None)
    (pulled,) = world.pull("w2")
    assert world.events(job_id) == []
    assert world.store.view(job_id)["status"] == "running"
    assert world.client.ttl(f"rq:job:{job_id}") == -1
    world.say(pulled, "new")
    assert world.end(pulled, tokens=1) == "ok"
    assert world.store.stream.tokens(job_id) == [{"index": 0, "text": "new", "token": 7}]


def test_a_job_requeued_with_rq_is_not_taken_for_ended_when_its_next_worker_dies(world: World) -> None:
    job_id = ended(world, "failed")
    world.job(job_id).requeue()
    world.store.renew_lease("w2", 100)
    world.pull("w2")
    world.client.delete("slotline:lease:w2")
    assert world.store.reclaim("w3").queued == [job_id]


def test_a_job_requeued_with_rq_can_be_cancelled_while_it_runs(world: World) -> None:
    job_id = ended(world, "failed")
    FailedJobRegistry(NORMAL, world.client, serializer=SERIALIZER).requeue(job_id)
    (pulled,) = world.pull("w2")
    assert world.store.cancel(job_id)["detail"] == "cancelling"
    assert world.end(pulled) == "cancelled"


def test_a_cancelled_job_that_is_requeued_with_rq_runs(world: World) -> None:
    job_id = world.submit()
    world.store.cancel(job_id)
    CanceledJobRegistry(NORMAL, world.client, serializer=SERIALIZER).requeue(job_id)
    (pulled,) = world.pull()
    assert world.end(pulled) == "ok"
    assert world.events(job_id) == ["done"]


def test_an_id_that_was_cancelled_once_can_be_enqueued_anew_with_rq(world: World) -> None:
    job_id = world.submit(id="nightly")
    world.store.cancel(job_id)
    world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}, job_id=job_id)
    (pulled,) = world.pull()
    assert request_of(pulled.record) == {"prompt": "hi"}
    assert world.end(pulled) == "ok"
