"""The proxy that the tests of outages rely on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from tests.processes import new_valkey
from tests.proxy import RedisProxy


@pytest.fixture
def proxy(client: redis.Redis, valkey: str) -> Iterator[RedisProxy]:
    with RedisProxy(valkey) as made:
        yield made


@pytest.fixture
def through(proxy: RedisProxy) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0), socket_timeout=0.5)
    yield client
    client.close()


def test_bytes_pass_both_ways(through: redis.Redis, client: redis.Redis) -> None:
    through.set("key", "x" * 300_000)
    assert client.strlen("key") == 300_000
    assert len(through.get("key") or b"") == 300_000


def test_one_reply_is_dropped_though_its_request_arrived(
    proxy: RedisProxy, through: redis.Redis, client: redis.Redis
) -> None:
    proxy.drop_next_reply_to(b"mine")
    through.set("other", "1")
    with pytest.raises(ConnectionError):
        through.incr("mine")
    assert through.incr("mine") == 2
    assert proxy.dropped == 1


def test_a_cut_closes_connections_and_refuses_new_ones_until_it_is_healed(
    proxy: RedisProxy, through: redis.Redis
) -> None:
    through.ping()
    for _ in range(3):
        proxy.cut()
        for _ in range(2):
            with pytest.raises(ConnectionError):
                through.ping()
        proxy.heal()
        assert through.ping()


def test_what_a_freeze_held_back_arrives_when_it_is_healed(
    proxy: RedisProxy, through: redis.Redis, client: redis.Redis
) -> None:
    through.ping()
    proxy.freeze()
    with pytest.raises(TimeoutError):
        through.set("late", "1")
    assert client.get("late") is None
    proxy.heal()
    assert through.ping()
    client.wait(0, 0)
    assert through.get("late") == b"1"


def test_a_server_that_is_not_there_looks_like_a_lost_connection(proxy: RedisProxy, through: redis.Redis) -> None:
    proxy.aim("redis://127.0.0.1:1")
    with pytest.raises(ConnectionError):
        through.ping()


def test_connections_go_to_another_server_once_it_is_aimed_there(proxy: RedisProxy, through: redis.Redis) -> None:
    through.set("where", "here")
    with new_valkey() as other:
        proxy.aim(other.connection_url)
        assert through.get("where") is None
        through.close()
