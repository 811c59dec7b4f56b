"""What RQ's own tools cancel or delete ends all the same, and leaves nothing behind."""

from __future__ import annotations

import pytest
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, DeferredJobRegistry

from shared.names import JOB_FUNCTION, events_key, job_key
from shared.schemas import JobRequest
from shared.strays import Strays
from tests.shared.world import MODEL, NORMAL, QUEUES, World


@pytest.fixture
def strays(world: World) -> Strays:
    return Strays(world.store)


def queued(world: World) -> str:
    return world.submit()


def scheduled(world: World) -> str:
    return world.submit(delay_s=1000)


def deferred(world: World) -> str:
    return world.submit(depends_on=world.submit())


def by_plain_rq(world: World) -> str:
    return world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}).id


def handed_back(world: World) -> str:
    pulled = world.take()
    world.say(pulled, "a", "b")
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    return pulled.record.id


def lost(world: World) -> str:
    """One that runs, whose worker will never look at it again."""
    pulled = world.take()
    world.say(pulled, "a", "b")
    return pulled.record.id


@pytest.mark.parametrize("make", [queued, scheduled, deferred, by_plain_rq, handed_back], ids=lambda f: f.__name__)
def test_a_job_that_rq_cancelled_ends_for_its_readers_too_and_is_not_kept_for_ever(
    make: object, world: World, strays: Strays
) -> None:
    job_id = make(world)  # type: ignore[operator]
    text = "ab" if make is handed_back else None
    world.job(job_id).cancel()
    strays.settle(QUEUES)
    assert world.events(job_id)[-1] == "done"
    shown = world.store.view(job_id)
    assert (shown["status"], shown["text"], shown["finish_reason"]) == ("cancelled", text, "cancelled")
    assert world.store.stream.last(job_id).json() | {"webhook": None} == shown  # type: ignore[union-attr]
    for key in (job_key(job_id), events_key(job_id)):
        assert 0 < world.client.ttl(key) <= 86_400, key
    assert world.pull(count=9) == [] or make is deferred
    before = world.events(job_id)
    strays.settle(QUEUES)
    assert world.events(job_id) == before


def test_the_worker_of_a_running_one_has_time_to_end_it_itself(world: World, strays: Strays) -> None:
    pulled = world.take()
    world.job(pulled.record.id).cancel()
    strays.settle(QUEUES)
    assert world.end(pulled, "cancelled") == "ok"
    strays.settle(QUEUES)
    assert world.events(pulled.record.id) == ["done"]


def test_one_whose_worker_never_looks_again_is_ended_and_the_worker_is_fenced(world: World, strays: Strays) -> None:
    pulled = world.take()
    world.say(pulled, "a")
    world.job(pulled.record.id).cancel()
    strays.settle(QUEUES)
    strays.settle(QUEUES)
    assert world.store.view(pulled.record.id)["text"] == "a"
    assert world.say(pulled, "b", start=1) == [pulled.execution]
    assert world.end(pulled, "cancelled") == "lost"
    assert world.events(pulled.record.id) == ["token", "done"]


def test_whoever_waits_for_the_end_of_a_job_that_rq_cancelled_is_told(world: World, strays: Strays) -> None:
    job_id = world.store.submit(JobRequest(prompt="hi"), MODEL, notify="feed").job_id
    world.job(job_id).cancel()
    strays.settle(QUEUES)
    assert world.client.lrange("feed", 0, -1) == [job_id.encode()]


@pytest.mark.parametrize("how", ["cancel", "delete", "empty"])
def test_what_waits_for_a_job_that_rq_removed_ends_with_it(how: str, world: World, strays: Strays) -> None:
    first = world.submit()
    second = world.submit(depends_on=first)
    third = world.submit(depends_on=second)
    if how == "empty":
        world.queue.empty()
    else:
        getattr(world.job(first), how)()
    strays.settle(QUEUES)
    strays.settle(QUEUES)
    for job_id in (second, third):
        shown = world.store.view(job_id)
        assert (shown["status"], shown["error"]["code"]) == ("cancelled", "dependency_failed")
    assert len(DeferredJobRegistry(NORMAL, connection=world.client)) == 0


def test_what_waits_for_others_as_well_goes_on_waiting(world: World, strays: Strays) -> None:
    first, second = world.submit(), world.submit()
    third = world.submit(depends_on=[first, second])
    (pulled,) = world.pull()
    world.end(pulled)
    world.record(pulled, JobStatus.FINISHED)
    world.job(first).delete()  # it has expired
    for _ in range(3):
        strays.settle(QUEUES)
    assert world.store.fetch(third).rq_status == "deferred"
    (pulled,) = world.pull()
    world.end(pulled)
    world.record(pulled, JobStatus.FINISHED)
    strays.settle(QUEUES)
    world.queue.enqueue_dependents(world.job(second))
    strays.settle(QUEUES)
    assert world.waiting() == [third]


def test_jobs_that_only_rq_knows_are_left_to_wait(world: World, strays: Strays) -> None:
    first = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"})
    second = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}, depends_on=first)
    first.cancel()
    strays.settle(QUEUES)
    strays.settle(QUEUES)
    assert world.job(second.id).get_status() == JobStatus.DEFERRED


def test_cancelled_jobs_that_have_expired_leave_the_registry(world: World, strays: Strays) -> None:
    ids = [world.submit() for _ in range(3)]
    for job_id in ids:
        world.store.cancel(job_id)
    world.expire(job_key(ids[1]))
    for _ in QUEUES:
        strays.settle(QUEUES)
    assert sorted(CanceledJobRegistry(NORMAL, connection=world.client).get_job_ids()) == sorted([ids[0], ids[2]])


@pytest.mark.parametrize("how", ["delete", "empty"])
@pytest.mark.parametrize("make", [handed_back, lost], ids=lambda f: f.__name__)
def test_the_log_of_a_deleted_job_goes_once_its_readers_had_time_to_look(make: object, how: str, world: World) -> None:
    job_id = make(world)  # type: ignore[operator]
    if how == "empty" and make is handed_back:
        world.queue.empty()
    else:
        world.job(job_id).delete()
    with world.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(events_key(job_id))
        channel.get_message(timeout=5)
        assert world.store.trim_index(0) == 0
        message = channel.get_message(timeout=5)
    assert message is not None and b'"removed"' in message["data"]
    assert 0 < world.client.ttl(events_key(job_id)) <= 60


def test_a_log_that_goes_sooner_anyway_is_left_so(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a")
    world.end(pulled, tokens=1, ttl_s=7)
    world.job(pulled.record.id).delete()
    world.store.trim_index(0)
    assert 0 < world.client.ttl(events_key(pulled.record.id)) <= 7
