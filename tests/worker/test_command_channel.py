"""The command channel on connections that break, with a word or without."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from shared.connection import connect
from shared.settings import Settings, load
from tests.processes import eventually
from tests.proxy import RedisProxy
from worker.command_channel import CommandChannel

LIMIT_S = 1.0


class Listening:
    """A channel on a thread of its own, as a worker has it."""

    def __init__(self, client: Any) -> None:
        self.heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.broke = threading.Event()
        channel = CommandChannel(client, LIMIT_S)
        channel.subscribe(commands=lambda message: self.heard.put(message["data"]))
        self.thread = channel.run_in_thread(sleep_time=0.05, exception_handler=self._on_error)

    def _on_error(self, error: Exception, channel: Any, thread: Any) -> None:
        self.broke.set()
        threading.Event().wait(0.05)


@pytest.fixture
def proxy(client: redis.Redis, valkey: str) -> Iterator[RedisProxy]:
    with RedisProxy(valkey) as made:
        yield made


@pytest.fixture
def listening(proxy: RedisProxy) -> Iterator[Listening]:
    client = connect(load(Settings, {"redis_url": proxy.url, "redis_timeout_s": LIMIT_S}))
    made = Listening(client)
    yield made
    made.thread.stop()
    made.thread.join(timeout=10)
    client.close()


def say(client: redis.Redis, listening: Listening, word: str) -> None:
    """Publish once somebody listens, and wait until it is heard."""
    eventually(lambda: client.publish("commands", word), "somebody listens")
    assert listening.heard.get(timeout=30) == word.encode()


def test_commands_are_heard_after_long_silence(client: redis.Redis, listening: Listening) -> None:
    say(client, listening, "first")
    assert not listening.broke.wait(3 * LIMIT_S), "the line is well, and says so when it is asked"
    say(client, listening, "second")


def test_commands_are_heard_after_a_cut(client: redis.Redis, listening: Listening, proxy: RedisProxy) -> None:
    say(client, listening, "first")
    proxy.cut()
    assert listening.broke.wait(30)
    proxy.heal()
    say(client, listening, "second")


def test_a_line_that_went_dead_without_a_word_is_replaced(
    client: redis.Redis, listening: Listening, proxy: RedisProxy
) -> None:
    say(client, listening, "first")
    before = {c["id"] for c in client.client_list(_type="pubsub")}
    proxy.freeze()
    assert listening.broke.wait(30), "a new line cannot be made either"
    proxy.heal()
    eventually(lambda: {c["id"] for c in client.client_list(_type="pubsub")} - before, "there is a new line")
    say(client, listening, "second")
