from __future__ import annotations

from typing import Any

import pytest
import redis
from rq.job import JobStatus

from shared.ahead import CHUNK, Pace
from shared.names import job_key
from shared.registry import Known, WorkerStats
from tests.shared.world import MODEL, NORMAL, World


def ahead(world: World, *job_ids: str) -> list[int | None]:
    return [world.store.ahead.of(job_id) for job_id in job_ids]


def known(*workers: dict[str, Any]) -> Known:
    figures: dict[str, Any] = {"worker": "w", "model": MODEL, "n_parallel": 4, "n_batch": 512, "n_ctx": 1024}
    return Known([], [WorkerStats(**(figures | given)) for given in workers])


def test_the_place_of_a_job_is_exact_while_jobs_leave_at_the_front(world: World) -> None:
    jobs = [world.submit() for _ in range(10)]
    assert ahead(world, *jobs) == list(range(10))
    world.pull(count=4)
    assert ahead(world, *jobs) == [None] * 4 + list(range(6))
    assert ahead(world, world.submit()) == [6]


def test_jobs_of_more_urgency_are_ahead_whoever_sent_them(world: World) -> None:
    job = world.submit()
    world.submit(priority="interactive")
    world.submit(priority="batch")
    tenant = f"{MODEL}:interactive:tenant"
    world.client.sadd(f"slotline:queues:{MODEL}", tenant)
    world.client.rpush(f"rq:queue:{tenant}", "one", "two")
    assert ahead(world, job) == [3]


@pytest.mark.parametrize("step", [1, -1])
def test_jobs_that_leave_out_of_turn_cost_no_more_than_the_place_is_worth(world: World, step: int) -> None:
    jobs = [world.submit() for _ in range(21)]
    middle = jobs[10]
    left = jobs.copy()
    for job in jobs[1:-1:2][::step]:
        if job != middle:
            world.store.cancel(job)
            left.remove(job)
        (place,) = ahead(world, middle)
        assert place is not None and abs(place - left.index(middle)) <= 3
    assert ahead(world, left[0], left[-1]) == [0, len(left) - 1]


def test_a_job_that_was_handed_back_goes_first(world: World) -> None:
    pulled = world.take()
    later = [world.submit() for _ in range(2)]
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    assert ahead(world, pulled.record.id, *later) == [0, 1, 2]


def test_a_job_that_is_retried_goes_last(world: World) -> None:
    pulled = world.take()
    world.end(pulled, "failed")
    world.record(pulled, JobStatus.FAILED)
    other = world.submit()
    world.store.retry(pulled.record.id)
    assert ahead(world, other, pulled.record.id) == [0, 1]


def test_what_rq_queued_has_no_place_among_others_and_takes_none_from_them(world: World) -> None:
    foreign = world.queue.enqueue("slotline.generate", {"prompt": "a"}).id
    assert ahead(world, foreign) == [0]
    ours = [world.submit() for _ in range(2)]
    assert ahead(world, foreign, *ours) == [None, 1, 2]
    world.pull()
    foreign = world.queue.enqueue("slotline.generate", {"prompt": "b"}).id
    assert ahead(world, *ours, foreign) == [0, 1, None]


def test_a_job_that_rq_queued_again_has_lost_its_ticket(world: World) -> None:
    pulled = world.take()
    world.end(pulled, "failed")
    world.record(pulled, JobStatus.FAILED)
    others = [world.submit() for _ in range(3)]
    world.job(pulled.record.id).requeue()
    assert ahead(world, pulled.record.id, *others) == [None, 0, 1, 2]


def test_what_does_not_wait_in_a_queue_has_no_place(world: World) -> None:
    assert ahead(world, "nobody", world.submit(delay_s=100), world.take().record.id) == [None, None, None]


def test_no_queue_is_looked_through(world: World, client: redis.Redis) -> None:
    jobs = [world.submit() for _ in range(3)]
    client.config_resetstat()
    for job in jobs:
        assert world.store.view(job)["position"]
    used = set(client.info("commandstats"))
    assert not used & {"cmdstat_lpos", "cmdstat_lrange"}
    assert "cmdstat_lindex" in used


def heard(client: redis.Redis, world: World, jobs: dict[str, str], *moments: Known) -> list[bytes]:
    """What the channels of jobs carry when they are told of one after the other."""
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.psubscribe("slotline:events:*")
        channel.get_message(timeout=5)
        for moment in moments:
            world.store.ahead.tell(jobs, moment)
        client.publish("slotline:events:end", "end")
        found: list[bytes] = []
        while not found or found[-1] != b"end":
            got = channel.get_message(timeout=5)
            if got is not None:
                found.append(got["data"])
    return found[:-1]


def test_waiting_jobs_are_told_of_and_no_more_often_than_every_few_seconds(world: World, client: redis.Redis) -> None:
    running, first, second = world.take().record.id, world.submit(), world.submit()
    jobs = dict.fromkeys((running, first, second), MODEL)
    moment = known({"idle_slots": 1, "job_s": 6.0})
    assert heard(client, world, jobs, moment, moment) == [
        b'{"event":"queued","id":"0-0","data":{"ahead":0,"estimate_s":0.0}}',
        b'{"event":"queued","id":"0-0","data":{"ahead":1,"estimate_s":1.5}}',
    ]
    for job in (first, second):
        assert 0 < client.pttl(f"slotline:told:{job}") < 5000
        client.delete(f"slotline:told:{job}")
    client.delete(job_key(first))
    assert len(heard(client, world, jobs, moment)) == 1


def test_without_figures_of_workers_there_is_no_estimate(world: World, client: redis.Redis) -> None:
    job = world.submit()
    (message,) = heard(client, world, {job: MODEL}, known())
    assert message == b'{"event":"queued","id":"0-0","data":{"ahead":0,"estimate_s":null}}'


def test_any_number_of_jobs_can_be_told_of(world: World, client: redis.Redis) -> None:
    jobs = dict.fromkeys([world.submit() for _ in range(CHUNK + 5)], MODEL)
    assert len(heard(client, world, jobs, known())) == CHUNK + 5
    assert world.client.llen(f"rq:queue:{NORMAL}") == CHUNK + 5


def test_the_pace_of_a_model_is_that_of_all_its_workers_that_take_jobs() -> None:
    fast, slow = {"idle_slots": 1, "job_s": 2.0}, {"idle_slots": 2, "job_s": 4.0}
    others = [{"model": "other", "job_s": 1.0}, {"draining": True, "job_s": 1.0, "idle_slots": 4}, {"idle_slots": 3}]
    pace = Pace.of(known(fast, slow, *others), MODEL)
    assert (pace.idle_slots, pace.job_s) == (6, pytest.approx(1 / 3))
    assert Pace.of(known(fast, *others), "default").job_s == pytest.approx(1 / 6)
    assert Pace.of(known(*others[1:]), MODEL) == Pace(3, None)
