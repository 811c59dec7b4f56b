"""A server that came back without its last seconds: what was written to it is taken back, and registered again."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from shared.names import KNOWN_RUN, SETTLING
from shared.rollback import Holdings
from shared.schemas import JobRequest
from shared.work import Pulled
from tests.shared.world import MODEL, NORMAL, World, until

#: Keys that only save looking or counting begin with these.
HINTS = ("slotline:doorbell:", "slotline:tickets:")


class Rollback:
    """The state of the server at a moment, to go back to."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        self._dump = {key: client.dump(key) for key in client.keys("*")}

    def __call__(self) -> None:
        self._client.flushall()
        for key, value in self._dump.items():
            self._client.restore(key, 0, value)


def state(client: Any) -> dict[str, Any]:
    """All that is stored, in forms that can be compared, but for what only saves looking."""
    readers = {
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: set(client.zrange(key, 0, -1)),
        b"string": client.get,
        b"stream": client.xrange,
    }
    keys = {key.decode() for key in client.keys("*")}
    found = {key: readers[client.type(key)](key) for key in keys if not key.startswith(HINTS)}
    for key in keys:
        if key.startswith("rq:execution:"):  # its times are those of the registration
            found[key] = {f: v for f, v in found[key].items() if f not in (b"created_at", b"last_heartbeat")}
    return found


@pytest.fixture
def holdings(client: redis.Redis) -> Holdings:
    """Those of the worker `w1`, which knew another server."""
    made = Holdings(client, "w1")
    made.run_id = "the one before"
    return made


def restore(holdings: Holdings, pulled: Pulled, **options: Any) -> str:
    return holdings.restore(pulled.record, pulled.execution, pulled.raw, **options)


@pytest.mark.parametrize("fields", [{}, {"delay_s": 60}, {"priority": "batch"}], ids=["queued", "scheduled", "batch"])
@pytest.mark.parametrize("lost", ["submit", "pull"])
def test_a_job_is_registered_again_as_it_was(
    world: World, client: redis.Redis, holdings: Holdings, lost: str, fields: dict[str, Any]
) -> None:
    nothing = Rollback(client)
    job_id = world.submit(**fields)
    submitted = Rollback(client)
    if "delay_s" in fields:  # as RQ's scheduler does it
        client.zrem(f"rq:scheduled:{NORMAL}", job_id)
        client.hset(f"rq:job:{job_id}", "status", "queued")
        client.rpush(f"rq:queue:{NORMAL}", job_id)
    (pulled,) = world.pull()
    before = state(client)
    (nothing if lost == "submit" else submitted)()
    assert restore(holdings, pulled) == "ok"
    assert state(client) == before
    assert world.say(pulled, "a") == []
    assert world.end(pulled, tokens=1) == "ok"


def test_a_submit_that_is_repeated_finds_the_job_that_was_registered_again(
    world: World, client: redis.Redis, holdings: Holdings
) -> None:
    request = JobRequest(prompt="hello")
    first = world.store.submit(request, MODEL, "a key")
    (pulled,) = world.pull()
    client.flushall()
    restore(holdings, pulled)
    again = world.store.submit(request, MODEL, "a key")
    assert (again.job_id, again.created) == (first.job_id, False)


def test_what_is_registered_is_left_as_it_is(world: World, client: redis.Redis, holdings: Holdings) -> None:
    pulled = world.take()
    before = state(client)
    assert restore(holdings, pulled) == "ok"
    assert state(client) == before
    world.end(pulled)
    assert restore(holdings, pulled) == "ended"


def test_the_same_server_has_forgotten_nothing(world: World, client: redis.Redis, holdings: Holdings) -> None:
    holdings.run_id = holdings.current_run_id()
    handed_back, erased = world.take(), world.take()
    world.store.hand_back("w1", [(handed_back.record.id, handed_back.execution)])
    client.delete(f"rq:job:{erased.record.id}")
    before = state(client)
    assert [restore(holdings, pulled) for pulled in (handed_back, erased)] == ["lost", "lost"]
    assert state(client) == before


def test_a_job_that_another_worker_has_pulled_since_is_lost(
    world: World, client: redis.Redis, holdings: Holdings
) -> None:
    submitted = world.submit()
    before = Rollback(client)
    (pulled,) = world.pull()
    before()
    (other,) = world.pull("w2")
    assert other.record.id == submitted
    assert restore(holdings, pulled) == "lost"
    assert world.say(other, "a") == []


def test_a_later_owner_takes_a_job_back_from_an_earlier_one(
    world: World, client: redis.Redis, holdings: Holdings
) -> None:
    earlier = world.take("w2")
    before = Rollback(client)
    world.store.hand_back("w2", [(earlier.record.id, earlier.execution)])
    (pulled,) = world.pull("w1")
    before()
    assert restore(holdings, pulled) == "ok"
    assert world.say(pulled, "a") == []
    assert world.say(earlier, "b") == [earlier.execution]


def test_a_job_that_was_cancelled_since_stays_so(world: World, client: redis.Redis, holdings: Holdings) -> None:
    world.submit(id="mine")
    before = Rollback(client)
    (pulled,) = world.pull()
    before()
    world.store.cancel("mine")
    assert restore(holdings, pulled) == "lost"
    assert world.store.view("mine")["status"] == "cancelled"


def test_a_job_that_has_ended_is_not_made_anew(world: World, client: redis.Redis, holdings: Holdings) -> None:
    pulled = world.take()
    client.flushall()
    assert restore(holdings, pulled, even_if_gone=False) == "lost"
    assert client.keys("*") == []


# --- nobody starts what may be running ---


@pytest.fixture
def new_server(client: redis.Redis) -> None:
    """Workers `w1` and `w2` live, and were registered in another server."""
    client.set(KNOWN_RUN, "the one before")
    client.sadd("slotline:workers", "w1", "w2")


@pytest.mark.usefixtures("new_server")
def test_nothing_is_pulled_before_all_workers_have_registered_what_they_hold(world: World, client: redis.Redis) -> None:
    world.submit()
    first, second = Holdings(client, "w1"), Holdings(client, "w2")
    assert world.pull() == []
    first.settle(first.current_run_id(), 60)
    assert world.pull() == []
    first.settle(first.current_run_id(), 60)
    assert client.smembers(SETTLING) == {b"w2"}
    second.settle(second.current_run_id(), 60)
    assert len(world.pull()) == 1


@pytest.mark.usefixtures("new_server")
def test_a_worker_that_does_not_come_back_is_waited_for_only_so_long(world: World, client: redis.Redis) -> None:
    world.submit()
    holdings = Holdings(client, "w1")
    holdings.settle(holdings.current_run_id(), 0.05)
    until(lambda: not client.exists(SETTLING))
    assert len(world.pull()) == 1


@pytest.mark.usefixtures("new_server")
@pytest.mark.parametrize("goes", ["leaves", "is buried"])
def test_a_worker_that_is_gone_is_not_waited_for(world: World, client: redis.Redis, goes: str) -> None:
    world.submit()
    holdings = Holdings(client, "w1")
    holdings.settle(holdings.current_run_id(), 60)
    if goes == "leaves":
        world.store.drop_lease("w2")
    else:
        world.store.bury("w2")
    assert len(world.pull()) == 1


def test_the_first_worker_of_a_new_database_waits_for_nobody(world: World, client: redis.Redis) -> None:
    world.submit()
    client.sadd("slotline:workers", "w1", "w2")
    holdings = Holdings(client, "w1")
    holdings.settle(holdings.current_run_id(), 60)
    assert len(world.pull()) == 1


def test_what_was_settled_with_one_server_says_nothing_of_the_next(world: World, client: redis.Redis) -> None:
    holdings = Holdings(client, "w1")
    holdings.settle("another server", 60)
    assert client.get(KNOWN_RUN) is None
