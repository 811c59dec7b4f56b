"""What a worker pulls beside what it holds, and what it listens for, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from shared.names import PRIORITIES, held_key, live_queues_key, queue_name
from shared.work import ALONE_AFTER_CRASHES
from tests.worker.beating import Beating
from worker.requests import HandedBack
from worker.slot_worker import LOOK_AGAIN_S, LOOK_S


@pytest.fixture
def beating(client: redis.Redis, valkey: str) -> Beating:
    for priority in PRIORITIES:  # so that no queue is new
        client.sadd(live_queues_key("fake-count"), queue_name("fake-count", priority))
    beating = Beating(client, valkey, n_parallel=2)
    beating.worker.heart.follow_queues()
    return beating


def running(beating: Beating) -> set[str]:
    return {slot.request.id for slot in beating.engine.pool.active if slot.request is not None}


def fill(beating: Beating, priority: str) -> list[str]:
    """As many jobs as there are slots, each in one."""
    ids = [beating.submit(priority=priority) for _ in range(2)]
    beating.pull()
    beating.engine.tick()
    assert running(beating) >= set(ids)
    return ids


class Bell:
    """Stands in for the doorbells: what has rung, what was passed on, and what is listened for."""

    def __init__(self) -> None:
        self.rung: str | None = None
        self.passed_on: list[str] = []
        self.levels: set[int] = set()

    def take(self) -> str | None:
        rung, self.rung = self.rung, None
        return rung

    def is_for(self, bell: str, levels: Any) -> bool:
        return PRIORITIES.index(bell) in set(levels)  # type: ignore[arg-type]

    def ring(self, bell: str) -> None:
        self.passed_on.append(bell)

    def listen(self, levels: Any) -> None:
        self.levels = set(levels)


@pytest.fixture
def bell(beating: Beating) -> Bell:
    beating.worker._bell = bell = Bell()  # type: ignore[assignment]
    return bell


def test_a_full_worker_pulls_what_is_more_urgent_and_displaces_the_youngest(beating: Beating) -> None:
    batch = fill(beating, "batch")
    normal = beating.submit(priority="normal")
    beating.pull()
    beating.engine.tick()
    assert running(beating) == {batch[0], normal}
    assert beating.client.llen(held_key("w")) == 3


def test_what_is_as_urgent_as_the_running_jobs_stays_for_others(beating: Beating) -> None:
    fill(beating, "normal")
    waiting = [beating.submit(priority=p) for p in ("normal", "batch")]
    beating.pull()
    assert not set(waiting) & {held.id for held in beating.worker.held.values()}


def test_no_more_urgent_jobs_are_held_than_there_are_slots(beating: Beating) -> None:
    fill(beating, "batch")
    for _ in range(3):
        beating.submit(priority="interactive")
    beating.pull()
    beating.pull()
    assert beating.client.llen(held_key("w")) == 4
    beating.submit(priority="normal")
    beating.pull()
    assert beating.client.llen(held_key("w")) == 4


def test_the_end_of_a_job_makes_room_and_wakes_the_main_thread(beating: Beating) -> None:
    first = beating.submit(max_tokens=1)
    fill_up, waiting = beating.submit(), beating.submit()
    beating.pull()
    beating.worker._wake.clear()
    beating.engine.tick()
    assert beating.ended() == {first: "length"} and beating.worker._wake.is_set()
    # The time to look has not come, but there was no room before.
    assert beating.worker._work_once() == LOOK_S
    beating.prepare()
    beating.engine.tick()
    assert running(beating) == {fill_up, waiting}


def test_a_slot_that_becomes_free_beside_others_is_no_reason_to_look(
    beating: Beating, bell: Bell, client: redis.Redis
) -> None:
    beating.submit(max_tokens=1)
    beating.pull()
    beating.pull()
    beating.engine.tick()
    calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert 0 < beating.worker._work_once() < LOOK_S
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == calls
    bell.rung = "normal"
    assert beating.worker._work_once() == LOOK_S
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == calls + 1


def test_it_listens_for_what_it_has_room_for(beating: Beating, bell: Bell) -> None:
    beating.pull()
    assert bell.levels == {0, 1, 2}
    fill(beating, "batch")
    assert bell.levels == {0, 1}
    fill(beating, "normal")
    assert bell.levels == {0}
    fill(beating, "interactive")
    assert bell.levels == set()


def test_a_ring_for_what_it_has_no_room_for_is_passed_on(beating: Beating, bell: Bell) -> None:
    fill(beating, "normal")
    for priority in PRIORITIES:
        bell.rung = priority
        beating.worker._work_once()
    assert bell.passed_on == ["normal", "batch"]


def test_a_full_worker_leaves_urgent_jobs_to_one_with_a_free_slot(
    beating: Beating, bell: Bell, client: redis.Redis, valkey: str
) -> None:
    fill(beating, "batch")
    idle = Beating(client, valkey, worker="w2", n_parallel=2)
    idle.worker.heart.follow_queues()
    idle.pull()
    urgent = [beating.submit(priority="interactive") for _ in range(3)]
    bell.rung = "interactive"
    assert beating.worker._work_once() == LOOK_AGAIN_S
    # It must not hear the ring that is meant for the other.
    assert bell.levels == set() and len(beating.worker.held) == 2
    idle.pull()
    assert {held.id for held in idle.worker.held.values()} == set(urgent[:2])
    assert beating.worker._work_once() == LOOK_S
    assert bell.levels == {0, 1} and len(beating.worker.held) == 3


def test_slots_are_dealt_out_to_tenants(beating: Beating, client: redis.Redis) -> None:
    for tenant in ("a", "b"):
        client.sadd("slotline:queues:fake-count", f"fake-count:normal:{tenant}")
    for tenant, count in (("a", 3), ("b", 3)):
        for _ in range(count):
            job_id = beating.submit()
            client.lrem("rq:queue:fake-count:normal:default", 0, job_id)
            client.hset(f"rq:job:{job_id}", "origin", f"fake-count:normal:{tenant}")
            client.rpush(f"rq:queue:fake-count:normal:{tenant}", job_id)
    beating.worker.heart.follow_queues()
    beating.pull()
    assert {held.record.origin for held in beating.worker.held.values()} == {
        "fake-count:normal:a",
        "fake-count:normal:b",
    }
    beating.engine.tick()
    assert beating.engine.served.keys() == {"fake-count:normal:a", "fake-count:normal:b"}


def held(beating: Beating) -> set[str]:
    return {job.id for job in beating.worker.held.values()}


def end(beating: Beating, job_id: str) -> None:
    (execution,) = [h.execution.id for h in beating.worker.held.values() if h.id == job_id]
    beating.engine.cancel(execution)
    beating.engine.tick()
    beating.worker._on_done(execution)


def submit_lone(beating: Beating) -> str:
    """A job whose process has died so often that it is to run alone."""
    job_id = beating.submit()
    beating.client.hset(f"rq:job:{job_id}", "sl_crashes", ALONE_AFTER_CRASHES)
    return job_id


def test_nothing_runs_beside_a_job_that_is_to_run_alone(beating: Beating) -> None:
    neighbour = beating.submit()
    beating.pull()
    beating.engine.tick()
    lone = submit_lone(beating)
    beating.pull()
    later = beating.submit(priority="interactive")
    beating.pull()
    beating.engine.tick()
    assert held(beating) == {neighbour, lone} and running(beating) == {neighbour}
    end(beating, neighbour)
    for _ in range(2):
        beating.pull()
        beating.engine.tick()
        assert held(beating) == running(beating) == {lone}
    end(beating, lone)
    beating.pull()
    beating.engine.tick()
    assert running(beating) == {later}


def test_neighbours_that_take_too_long_are_handed_back_for_it(client: redis.Redis, valkey: str) -> None:
    beating = Beating(client, valkey, n_parallel=2, drain_s=0)
    beating.worker.heart.follow_queues()
    beating.submit()
    beating.pull()
    beating.engine.tick()
    lone = submit_lone(beating)
    beating.pull()
    beating.engine.tick()
    assert not running(beating) and [type(event) for event in beating.events][-1] is HandedBack
    beating.pull()
    beating.engine.tick()
    assert running(beating) == {lone}
