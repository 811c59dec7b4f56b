"""Which jobs a pull takes, and in what order: room by priority, the turns of tenants, and age."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from rq import Queue
from rq.utils import now, utcformat

from shared.names import JOB_FUNCTION, PRIORITIES, SERIALIZER, queue_name
from shared.work import Opening, Taken
from tests.shared.world import MODEL, World

# --- room, by priority ---


def openings(*room: int, **credits: float) -> list[Opening]:
    """Room for the jobs of each priority with room, most urgent first; other tenants than `default` have credits."""
    tenants = credits or {"default": 0.0}
    return [
        Opening(level, jobs, {queue_name(MODEL, PRIORITIES[level], t): credit for t, credit in tenants.items()})
        for level, jobs in enumerate(room)
        if jobs
    ]


def submit_each(world: World, count: int) -> dict[str, list[str]]:
    return {p: [world.submit(priority=p) for _ in range(count)] for p in PRIORITIES}


def ids(taken: Taken) -> list[str]:
    return [pulled.record.id for pulled in taken.jobs]


def test_the_room_of_a_priority_is_used_up_by_more_urgent_jobs_too(world: World) -> None:
    waiting = submit_each(world, 3)
    taken = world.store.take("w1", MODEL, openings(4, 4, 4))
    assert ids(taken) == [*waiting["interactive"], waiting["normal"][0]]


def test_a_worker_without_a_free_slot_takes_urgent_jobs_only(world: World) -> None:
    waiting = submit_each(world, 3)
    assert ids(world.store.take("w1", MODEL, openings(2, 0, 0))) == waiting["interactive"][:2]
    assert ids(world.store.take("w1", MODEL, openings(9, 1, 0))) == [waiting["interactive"][2]]
    assert ids(world.store.take("w1", MODEL, openings(9, 1, 0))) == [waiting["normal"][0]]


def test_less_urgent_jobs_take_nothing_from_the_room_of_urgent_ones(world: World) -> None:
    waiting = submit_each(world, 2)
    assert ids(world.store.take("w1", MODEL, openings(3, 2, 1))) == waiting["interactive"]
    world.store.take("w1", MODEL, openings(0, 9, 9))
    more = world.submit(priority="interactive")
    assert ids(world.store.take("w1", MODEL, openings(1, 0, 0))) == [more]


def test_what_is_left_over_is_told_and_rung_for_once(world: World) -> None:
    waiting = submit_each(world, 2)
    world.client.delete(*world.client.keys("slotline:doorbell:*"))
    taken = world.store.take("w1", MODEL, openings(9, 3, 3))
    assert ids(taken) == [*waiting["interactive"], waiting["normal"][0]]
    assert taken.waiting == {queue_name(MODEL, p) for p in ("normal", "batch")}
    bells = {f"slotline:doorbell:{MODEL}:{p}": 1 for p in ("normal", "batch")}
    assert {key.decode(): world.client.llen(key) for key in world.client.keys("slotline:doorbell:*")} == bells


def test_a_pull_tells_how_many_queues_there_are_by_now(world: World) -> None:
    assert world.store.take("w1", MODEL, openings(1)).live_queues == 0
    world.submit()
    world.submit(priority="batch")
    world.client.sadd("slotline:queues:default", queue_name("default", "normal"))
    assert world.store.take("w1", MODEL, openings(1)).live_queues == 3


# --- other workers ---


def test_no_job_is_displaced_while_another_worker_has_a_free_slot(world: World) -> None:
    assert ids(world.store.take("idle", MODEL, openings(2, 2, 2), free=2)) == []
    urgent = [world.submit(priority="interactive") for _ in range(3)]
    taken = world.store.take("full", MODEL, openings(4, 0, 0), free=0)
    assert (ids(taken), taken.leaves_some) == ([], True)
    assert world.client.llen(f"slotline:doorbell:{MODEL}:interactive") == 1
    assert ids(world.store.take("idle", MODEL, openings(2, 2, 2), free=2)) == urgent[:2]
    taken = world.store.take("full", MODEL, openings(4, 0, 0), free=0)
    assert (ids(taken), taken.leaves_some) == (urgent[2:], False)


def test_a_worker_uses_its_own_free_slots_whatever_others_have(world: World) -> None:
    for name in ("w1", "w2"):
        world.store.take(name, MODEL, openings(2, 2, 2), free=2)
    urgent = [world.submit(priority="interactive") for _ in range(3)]
    taken = world.store.take("w1", MODEL, openings(4, 1, 1), free=1)
    assert (ids(taken), taken.leaves_some) == (urgent[:1], True)
    assert ids(world.store.take("w2", MODEL, openings(2, 2, 2), free=2)) == urgent[1:]


def test_what_there_is_no_room_for_anyway_is_not_left_to_others(world: World) -> None:
    world.store.take("idle", MODEL, openings(2, 2, 2), free=2)
    batch = [world.submit(priority="batch") for _ in range(3)]
    taken = world.store.take("busy", MODEL, openings(4, 1, 1), free=1)
    assert (ids(taken), taken.leaves_some) == (batch[:1], False)


def test_nothing_is_left_to_a_worker_that_has_not_looked_for_a_while(world: World) -> None:
    world.store.take("hangs", MODEL, openings(2, 2, 2), free=2)
    world.client.zadd(f"slotline:free:{MODEL}", {"hangs": time.time() * 1000 - 1})
    urgent = world.submit(priority="interactive")
    assert ids(world.store.take("full", MODEL, openings(4, 0, 0), free=0)) == [urgent]


def test_with_nothing_to_take_nothing_is_left_to_others(world: World) -> None:
    world.store.take("idle", MODEL, openings(2, 2, 2), free=2)
    assert not world.store.take("full", MODEL, openings(4, 0, 0), free=0).leaves_some


def test_a_worker_that_fills_up_is_no_longer_relied_on(world: World) -> None:
    world.submit()
    assert len(ids(world.store.take("w1", MODEL, openings(1, 1, 1), free=1))) == 1
    assert world.client.zcard(f"slotline:free:{MODEL}") == 0


# --- tenants ---


def enqueue(world: World, tenant: str, count: int = 1, priority: str = "normal") -> list[str]:
    queue = Queue(queue_name(MODEL, priority, tenant), connection=world.client, serializer=SERIALIZER)
    return [queue.enqueue(JOB_FUNCTION, {"prompt": tenant}).id for _ in range(count)]


def tenants(taken: Taken) -> list[str]:
    return [pulled.record.origin.split(":")[2] for pulled in taken.jobs]


def test_free_slots_are_dealt_out_to_tenants_in_turn(world: World) -> None:
    for tenant in ("a", "b", "c"):
        enqueue(world, tenant, 9)
    taken = world.store.take("w1", MODEL, openings(0, 7, a=0.0, b=0.0, c=0.0), quantum=100)
    assert tenants(taken) == ["a", "b", "c", "a", "b", "c", "a"]


def test_whoever_is_owed_more_comes_first_until_it_is_owed_no_more(world: World) -> None:
    for tenant in ("a", "b", "c"):
        enqueue(world, tenant, 9)
    taken = world.store.take("w1", MODEL, openings(0, 6, a=-500.0, b=0.0, c=-250.0), quantum=100)
    assert tenants(taken) == ["b", "b", "b", "c", "b", "c"]


def test_the_turn_of_a_tenant_with_nothing_to_do_goes_to_the_others(world: World) -> None:
    enqueue(world, "a", 1)
    enqueue(world, "b", 9)
    taken = world.store.take("w1", MODEL, openings(0, 4, a=1000.0, idle=5000.0, b=0.0), quantum=1)
    assert tenants(taken) == ["a", "b", "b", "b"]


# --- age ---

AGE_S = 100.0


def age(world: World, job_id: str, seconds: float, field: str = "enqueued_at") -> None:
    world.client.hset(f"rq:job:{job_id}", field, utcformat(now() - timedelta(seconds=seconds)))


def take_lending(world: World, *room: int, lends: bool = True, **credits: float) -> Taken:
    return world.store.take("w1", MODEL, openings(*room, **credits), age_s=AGE_S, lends=lends)


@pytest.mark.parametrize(
    ("priority", "waited_s", "over"),
    [
        ("batch", 1.1 * AGE_S, {"normal"}),
        ("batch", 0.9 * AGE_S, set()),
        ("batch", 2.1 * AGE_S, {"normal", "interactive"}),
        ("normal", 1.1 * AGE_S, {"interactive"}),
        ("normal", 0.9 * AGE_S, set()),
        ("normal", 9.9 * AGE_S, {"interactive"}),
    ],
)
def test_a_job_that_has_waited_long_comes_before_fresh_ones_of_the_next_priority(
    priority: str, waited_s: float, over: set[str], world: World
) -> None:
    more_urgent = PRIORITIES[: PRIORITIES.index(priority)]  # type: ignore[arg-type]
    for fresh in more_urgent:
        world.client.flushdb()
        old = world.submit(priority=priority)
        age(world, old, waited_s)
        job_id = world.submit(priority=fresh)
        (first,) = take_lending(world, 1, 1, 1).jobs
        assert first.record.id == (old if fresh in over else job_id)
        assert first.rank == PRIORITIES.index(fresh)  # type: ignore[arg-type]
        assert first.record.priority == (priority if fresh in over else fresh)


def test_only_one_job_is_taken_before_its_time_and_only_where_that_is_allowed(world: World) -> None:
    old = [world.submit(priority="batch") for _ in range(3)]
    for job_id in old:
        age(world, job_id, 5 * AGE_S)
    fresh = [world.submit(priority="interactive") for _ in range(9)]
    assert ids(take_lending(world, 2, 2, 2, lends=False)) == fresh[:2]
    assert ids(take_lending(world, 4, 4, 4)) == [old[0], *fresh[2:5]]


def test_an_old_job_needs_a_slot_that_is_free(world: World) -> None:
    old = world.submit(priority="batch")
    age(world, old, 5 * AGE_S)
    fresh = [world.submit(priority="interactive") for _ in range(3)]
    assert ids(take_lending(world, 2, 2, 0)) == fresh[:2]
    assert world.waiting(queue_name(MODEL, "batch")) == [old]


def test_an_old_job_goes_in_its_own_order_where_nobody_more_urgent_waits(world: World) -> None:
    old = world.submit(priority="batch")
    age(world, old, 5 * AGE_S)
    (taken,) = take_lending(world, 2, 2, 2).jobs
    assert (taken.record.id, taken.rank) == (old, 2)


def test_the_oldest_is_taken_of_those_that_are_old_enough(world: World) -> None:
    normal, batch = world.submit(priority="normal"), world.submit(priority="batch")
    age(world, normal, 1.5 * AGE_S)
    age(world, batch, 3 * AGE_S)
    fresh = world.submit(priority="interactive")
    assert ids(take_lending(world, 2, 2, 2)) == [batch, fresh]


def test_age_settles_nothing_among_the_tenants_of_a_priority(world: World) -> None:
    (older,) = enqueue(world, "hog", 1, "batch")
    (old,) = enqueue(world, "modest", 1, "batch")
    age(world, older, 9 * AGE_S)
    age(world, old, 2.5 * AGE_S)
    enqueue(world, "modest", 3, "interactive")
    assert ids(take_lending(world, 2, 2, 2, hog=-1000.0, modest=0.0))[0] == old


def test_only_the_heads_of_queues_are_looked_at(world: World) -> None:
    head, second = world.submit(priority="batch"), world.submit(priority="batch")
    age(world, second, 9 * AGE_S)
    fresh = world.submit(priority="interactive")
    assert ids(take_lending(world, 1, 1, 1)) == [fresh]
    assert world.waiting(queue_name(MODEL, "batch")) == [head, second]


def test_an_old_job_behind_one_that_was_deleted_is_found(world: World) -> None:
    gone, old = world.submit(priority="batch"), world.submit(priority="batch")
    world.client.delete(f"rq:job:{gone}")
    age(world, old, 9 * AGE_S)
    world.submit(priority="interactive")
    assert ids(take_lending(world, 1, 1, 1)) == [old]


@pytest.mark.parametrize("missing", ["", None])
def test_without_a_time_of_queueing_that_of_creation_counts(missing: str | None, world: World) -> None:
    old = world.submit(priority="batch")
    if missing is None:
        world.client.hdel(f"rq:job:{old}", "enqueued_at")
    else:
        world.client.hset(f"rq:job:{old}", "enqueued_at", missing)
    fresh = [world.submit(priority="interactive") for _ in range(2)]
    assert ids(take_lending(world, 1, 1, 1)) == fresh[:1]
    age(world, old, 9 * AGE_S, "created_at")
    assert ids(take_lending(world, 1, 1, 1)) == [old]


def test_a_job_enqueued_with_rq_ages_too(world: World) -> None:
    job = Queue(queue_name(MODEL, "batch"), connection=world.client, serializer=SERIALIZER).enqueue(JOB_FUNCTION, {})
    age(world, job.id, 3 * AGE_S)
    world.submit(priority="interactive")
    assert ids(take_lending(world, 1, 1, 1)) == [job.id]


def test_a_job_that_is_handed_back_keeps_its_age(world: World) -> None:
    old = world.submit(priority="batch")
    age(world, old, 9 * AGE_S)
    (pulled,) = world.pull()
    world.store.hand_back("w1", [(old, pulled.execution)])
    world.submit(priority="interactive")
    assert ids(take_lending(world, 1, 1, 1)) == [old]
