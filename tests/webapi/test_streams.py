from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from shared.connection import connect
from shared.errors import RedisUnavailable, Unavailable
from shared.names import events_key
from shared.settings import Settings
from shared.stream import Event, EventId, dumps
from tests.webapi.conftest import web_settings
from webapi import streams, subscription
from webapi.streams import Hub
from webapi.subscription import Notice, Subscription


@pytest.fixture
def hub(client: redis.Redis, settings: Settings) -> Iterator[Hub]:
    hub = Hub(web_settings(settings, max_streams=300), client)
    yield hub
    hub.close()


def publish(client: redis.Redis, job_id: str, index: int) -> None:
    data = {"index": index, "text": "", "token": 1}
    client.publish(events_key(job_id), dumps({"event": "token", "id": f"{index + 1}-0", "data": data}))


def indices(reader: Subscription, count: int) -> list[int | None]:
    found = [reader.get(5) for _ in range(count)]
    return [event.index for event in found if isinstance(event, Event)]


def test_what_is_published_after_open_arrives(hub: Hub, client: redis.Redis) -> None:
    with hub.open("a") as reader:
        publish(client, "a", 0)
        publish(client, "b", 0)
        publish(client, "a", 1)
        assert indices(reader, 2) == [0, 1]
        assert reader.get(0.01) is Notice.SILENCE


def test_readers_of_any_number_of_jobs_share_one_connection(hub: Hub, client: redis.Redis) -> None:
    readers = [hub.open(f"job{n % 50}") for n in range(200)]
    assert len(client.client_list(_type="pubsub")) == 1
    for n in range(50):
        publish(client, f"job{n}", n)
    assert [indices(reader, 1) for reader in readers] == [[n % 50] for n in range(200)]
    for reader in readers:
        reader.close()
    assert hub.open_streams == 0


def test_the_connection_goes_some_time_after_the_last_reader(
    hub: Hub, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "TICK_S", 0.02)
    monkeypatch.setattr(streams, "LINGER_S", 0.05)
    hub.open("a").close()
    for thread in threading.enumerate():
        if thread.name == "stream-hub":
            thread.join(timeout=10)
            assert not thread.is_alive()
    assert client.client_list(_type="pubsub") == []
    with hub.open("a") as reader:
        publish(client, "a", 0)
        assert indices(reader, 1) == [0]


def test_a_channel_without_readers_is_let_go(hub: Hub, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.open("a").close()
    with hub.open("b") as other:
        publish(client, "a", 0)  # nobody reads it, so the hub lets go of it
        publish(client, "b", 0)
        assert indices(other, 1) == [0]
        deadline = time.monotonic() + 10
        while client.pubsub_channels(events_key("a")) and time.monotonic() < deadline:
            other.get(0.01)
        assert client.pubsub_channels(events_key("a")) == []


def test_a_reader_that_returns_to_a_channel_just_let_go_is_subscribed_again(hub: Hub, client: redis.Redis) -> None:
    for index in range(20):
        with hub.open("a") as reader:
            publish(client, "a", index)
            assert indices(reader, 1) == [index]


def test_readers_of_jobs_with_ids_of_the_hub_share_one_subscription(hub: Hub, client: redis.Redis) -> None:
    ids = [hub.new_id() for _ in range(20)]
    readers = [hub.open(job_id) for job_id in ids] + [hub.open(f"{ids[0]}-1")]
    assert client.pubsub_numpat() == 1
    assert client.pubsub_channels(events_key("*")) == []
    for index, job_id in enumerate([*ids, f"{ids[0]}-1"]):
        publish(client, job_id, index)
    assert [indices(reader, 1) for reader in readers] == [[index] for index in range(21)]


def test_a_job_with_an_id_of_another_hub_is_followed_too(hub: Hub, client: redis.Redis, settings: Settings) -> None:
    other = Hub(web_settings(settings), client)
    job_id = other.new_id()
    with hub.open(job_id) as here, other.open(job_id) as there:
        publish(client, job_id, 3)
        assert indices(here, 1) == indices(there, 1) == [3]
        assert here.get(0.01) is there.get(0.01) is Notice.SILENCE
    other.close()


def test_a_lost_connection_is_a_gap_for_jobs_with_ids_of_the_hub_too(hub: Hub, client: redis.Redis) -> None:
    job_id = hub.new_id()
    reader = hub.open(job_id)
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert reader.get(10) is Notice.GAP
    publish(client, job_id, 5)
    assert indices(reader, 1) == [5]


def test_a_slow_reader_gets_a_gap_and_the_others_everything(
    hub: Hub, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "QUEUE_LIMIT", 3)
    slow, quick = hub.open("a"), hub.open("a")
    for index in range(10):
        publish(client, "a", index)
        assert indices(quick, 1) == [index]
    assert slow.get(5) is Notice.GAP


def test_a_reader_that_empties_its_queue_while_it_is_filled_is_woken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "QUEUE_LIMIT", 100_000)
    reader = Subscription("a", lambda _: None)
    events = [Event(EventId.of_token(index), "token", "{}") for index in range(20_000)]
    filling = threading.Thread(target=lambda: [reader.offer(event) for event in events])
    filling.start()
    assert [reader.get(30) for _ in events] == events
    filling.join()
    assert reader.get(0) is Notice.SILENCE


def test_a_lost_connection_is_a_gap_and_is_made_again(hub: Hub, client: redis.Redis) -> None:
    reader = hub.open("a")
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert reader.get(10) is Notice.GAP
    publish(client, "a", 5)
    assert indices(reader, 1) == [5]


def test_what_is_no_event_is_ignored(hub: Hub, client: redis.Redis) -> None:
    with hub.open("a") as reader:
        client.publish(events_key("a"), "[]")
        client.publish(events_key("a"), "no json")
        client.publish(events_key("a"), '{"event":"token","id":"1-0","data":7}')
        publish(client, "a", 0)
        assert indices(reader, 1) == [0]


def test_readers_beyond_the_limit_are_refused(client: redis.Redis, settings: Settings) -> None:
    hub = Hub(web_settings(settings, max_streams=1), client)
    with hub.open("a"), pytest.raises(Unavailable):
        hub.open("b")
    hub.close()


def test_a_closed_hub_ends_its_readers_and_takes_no_more(hub: Hub) -> None:
    reader = hub.open("a")
    hub.close()
    assert reader.get(5) is Notice.CLOSED
    with pytest.raises(Unavailable):
        hub.open("a")


def test_without_redis_open_fails_and_leaves_no_reader(settings: Settings) -> None:
    dead = web_settings(settings, redis_url="redis://127.0.0.1:1")
    hub = Hub(dead, connect(dead))
    with pytest.raises((redis.ConnectionError, RedisUnavailable)):
        hub.open("a")
    assert hub.open_streams == 0
    hub.close()


#: A job whose messages never stop coming, below gevent; prints the most of them that were handled between two turns of
#: another greenlet that asks Redis something.
FLOOD = """
from gevent import monkey
monkey.patch_all()
import sys, threading, gevent, redis
from shared.connection import connect
from shared.names import events_key
from shared.settings import WebSettings, load
from webapi.streams import Hub

settings = load(WebSettings, {"redis_url": sys.argv[1]})
client = connect(settings)
hub = Hub(settings, client)
handled, most = 0, 0
handle = Hub._handle

def count(self, connection, message):
    global handled
    handled += 1
    handle(self, connection, message)

Hub._handle = count
hub.open("a")
flood = "for i = 1, 30000 do redis.call('PUBLISH', KEYS[1], ARGV[1]) end"
gevent.spawn(connect(settings).eval, flood, 1, events_key("a"), '{"event":"token","id":"1-0","data":{}}')
while handled < 30000:
    before = handled
    client.ping()
    most = max(most, handled - before)
print(most)
hub.close()
"""


@pytest.mark.integration
def test_a_flood_of_messages_lets_other_requests_have_their_turn(client: redis.Redis, valkey: str) -> None:
    command = [sys.executable, "-c", FLOOD, valkey]
    most = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    # A few slices of the hub; without its pauses all 30,000.
    assert most < 10_000
