from __future__ import annotations

import pytest
import redis
from rq.job import JobStatus

from shared.batches.feeding import LOOK_S, Feed
from shared.errors import IdConflict, QueueFull
from shared.jobs import JobStore
from shared.names import JOBS_INDEX, feed_key
from shared.registry import ModelCard, Registry
from shared.schemas import JobRequest
from tests.shared.world import MODEL, QUEUES, World


class Clock:
    """A clock that stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world(store: JobStore, client: redis.Redis) -> World:
    return World(store, client)


@pytest.fixture
def feed(store: JobStore, clock: Clock) -> Feed:
    return Feed(store, "b1", clock)


def request(prompt: str = "hello") -> JobRequest:
    return JobRequest(prompt=prompt, priority="batch")


def submit(feed: Feed, *job_ids: str) -> None:
    for job_id in job_ids:
        feed.submit(job_id, request(job_id), MODEL)


def run(world: World, count: int, status: str = "completed") -> None:
    """Pull jobs and end them, their records too."""
    for pulled in world.pull(count=count):
        assert world.end(pulled, status, tokens=3) == "ok"
        done = {"completed": JobStatus.FINISHED, "failed": JobStatus.FAILED}[status]
        world.record(pulled, done)


def test_a_job_that_ends_is_told_of_once_with_its_result(feed: Feed, world: World) -> None:
    submit(feed, "b1-1-0", "b1-2-0")
    assert feed.ended(0) == []
    run(world, 1)
    assert feed.ended(0) == ["b1-1-0"]
    assert feed.ended(0) == []
    finals = feed.finals(["b1-1-0", "b1-2-0"])
    assert list(finals) == ["b1-1-0"] and finals["b1-1-0"]["text"] == "xxx"


def test_a_failed_one_and_a_cancelled_one_are_told_of_too(feed: Feed, world: World) -> None:
    submit(feed, "b1-1-0", "b1-2-0")
    run(world, 1, "failed")
    world.store.cancel("b1-2-0")
    assert feed.ended(0) == ["b1-1-0", "b1-2-0"]
    assert [f["status"] for f in feed.finals(["b1-1-0", "b1-2-0"]).values()] == ["failed", "cancelled"]


def test_waiting_is_over_as_soon_as_one_ends(feed: Feed, world: World) -> None:
    submit(feed, "b1-1-0")
    run(world, 1)
    assert feed.ended(wait_s=4) == ["b1-1-0"]


def test_two_feeds_hear_only_of_their_own(feed: Feed, world: World, store: JobStore) -> None:
    other = Feed(store, "b2")
    submit(feed, "b1-1-0")
    submit(other, "b2-1-0")
    run(world, 2)
    assert (feed.ended(0), other.ended(0)) == (["b1-1-0"], ["b2-1-0"])


def test_one_that_comes_back_finds_what_ended_while_it_was_away(feed: Feed, world: World, store: JobStore) -> None:
    submit(feed, "b1-1-0", "b1-2-0")
    run(world, 1)
    assert feed.ended(0) == ["b1-1-0"]  # and then it dies, before it has done anything with it
    back = Feed(store, "b1")
    submit(back, "b1-1-0", "b1-2-0")
    assert back.ended(0) == ["b1-1-0"]
    assert world.waiting(QUEUES[-1]) == ["b1-2-0"]


def test_an_end_that_rang_no_bell_is_found_by_looking(feed: Feed, world: World, clock: Clock) -> None:
    submit(feed, "b1-1-0", "b1-2-0", "b1-3-0")
    world.job("b1-1-0").cancel()
    world.job("b1-2-0").delete()
    assert feed.ended(0) == []
    clock.now += LOOK_S
    assert feed.ended(0) == ["b1-1-0", "b1-2-0"]
    finals = feed.finals(["b1-1-0", "b1-2-0", "b1-3-0"])
    assert finals["b1-1-0"]["status"] == "cancelled" and finals["b1-2-0"] is None
    assert "b1-3-0" not in finals


def test_an_id_of_somebody_else_is_refused(feed: Feed, world: World) -> None:
    world.submit(id="b1-1-0", prompt="another")
    with pytest.raises(IdConflict):
        submit(feed, "b1-1-0")


def test_a_full_queue_is_told(feed: Feed, client: redis.Redis) -> None:
    Registry(client).register_model(ModelCard(MODEL, "", 100, 10, 100, False, 1, ""))
    submit(feed, "b1-1-0")
    with pytest.raises(QueueFull):
        submit(feed, "b1-2-0")


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_discarding_leaves_nothing_of_a_job(feed: Feed, world: World, client: redis.Redis, status: str) -> None:
    before = world.keys()
    submit(feed, "b1-1-0")
    run(world, 1, status)
    assert client.zcard(JOBS_INDEX) == 1
    assert feed.discard(["b1-1-0"]) == []
    feed.close()
    left = {key for key in world.keys() - before if "b1" in key}
    assert left == set()
    assert not client.exists("rq:finished:" + QUEUES[-1], "rq:failed:" + QUEUES[-1], JOBS_INDEX)


def test_a_job_whose_worker_has_yet_to_record_the_end_stays_until_then(feed: Feed, world: World) -> None:
    submit(feed, "b1-1-0")
    (pulled,) = world.pull()
    world.end(pulled)
    assert feed.ended(0) == ["b1-1-0"]
    assert feed.discard(["b1-1-0"]) == ["b1-1-0"]
    world.record(pulled, JobStatus.FINISHED)
    assert feed.discard(["b1-1-0"]) == []
    assert feed.finals(["b1-1-0"]) == {"b1-1-0": None}


def test_only_what_waits_can_be_withdrawn(feed: Feed, world: World, clock: Clock) -> None:
    submit(feed, "b1-1-0", "b1-2-0", "b1-3-0")
    run(world, 1)
    (running,) = world.pull()
    assert feed.withdraw(["b1-1-0", "b1-2-0", "b1-3-0"]) == ["b1-1-0", "b1-2-0"]
    assert world.waiting(QUEUES[-1]) == [] and running.record.id == "b1-2-0"
    clock.now += LOOK_S
    assert "b1-3-0" not in feed.ended(0)


def test_cancelling_tells_what_had_ended_and_rings_for_nothing_else(
    feed: Feed, world: World, client: redis.Redis
) -> None:
    submit(feed, "b1-1-0", "b1-2-0", "b1-3-0")
    run(world, 1)
    (running,) = world.pull()
    assert feed.cancel(["b1-1-0", "b1-2-0", "b1-3-0", "b1-4-0"]) == ["b1-1-0"]
    assert world.end(running) == "cancelled"
    assert world.end(running, "cancelled") == "ok"
    assert feed.finals(["b1-2-0", "b1-3-0"])["b1-3-0"] is None
    feed.close()
    assert not client.exists(feed_key("b1"))


def test_what_is_marked_is_found_by_the_next_one_until_it_is_discarded(
    feed: Feed, world: World, store: JobStore
) -> None:
    submit(feed, "b1-1-0", "b1-2-0", "b1-3-0")
    run(world, 2)
    feed.mark([])
    feed.mark(["b1-1-0", "b1-2-0", "b1-3-0"])
    feed.unmark(["b1-3-0"])
    feed.discard(["b1-1-0"])
    assert Feed(store, "b1").marked() == ["b1-2-0"]


def test_jobs_of_one_before_us_can_be_looked_for(feed: Feed, world: World, store: JobStore) -> None:
    submit(feed, "b1-1-0", "b1-2-0")
    run(world, 1)
    back = Feed(store, "b1")
    assert back.find(["b1-1-0", "b1-2-0", "b1-3-0"]) == ["b1-1-0", "b1-2-0"]
    assert back.ended(0) == ["b1-1-0"]


def test_what_is_discarded_or_gone_can_be_submitted_anew(feed: Feed, world: World) -> None:
    submit(feed, "b1-1-0")
    feed.withdraw(["b1-1-0"])
    submit(feed, "b1-1-0")
    run(world, 1)
    assert feed.ended(0) == ["b1-1-0"]


def test_closing_forgets_the_bells(feed: Feed, world: World, client: redis.Redis) -> None:
    submit(feed, "b1-1-0")
    run(world, 1)
    assert client.llen(feed_key("b1")) == 1
    feed.close()
    assert not client.exists(feed_key("b1"))
