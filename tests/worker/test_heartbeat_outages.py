"""A worker's beats while Redis is full, and after replies that were lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from shared.names import events_key, held_key, lease_key, queue_name
from tests.processes import eventually
from tests.worker.beating import Beating

QUEUE = queue_name("fake-count", "normal")


@pytest.fixture
def full(client: redis.Redis) -> Iterator[None]:
    """Redis is full after `fill`."""
    yield
    client.config_set("maxmemory", 0)


def fill(client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)


@pytest.mark.usefixtures("full")
def test_a_full_redis_keeps_leases_and_cancels_jobs(client: redis.Redis, valkey: str) -> None:
    beating = Beating(client, valkey)
    job_id, other = beating.submit(), beating.submit()
    beating.worker.heart.beat()
    beating.pull()
    beating.engine.tick()
    assert len(beating.engine.pool.active) == 2
    client.hset(f"rq:job:{job_id}", "sl_cancel", "1")
    fill(client)
    client.pexpire(lease_key("w"), 3000)
    beating.worker.heart.beat()
    beating.engine.tick()
    assert client.pttl(lease_key("w")) > 3000
    assert beating.ended() == {job_id: "cancelled"}
    assert beating.worker.heart.is_healthy
    assert [s.request.id for s in beating.engine.pool.active if s.request] == [other]


def test_a_pull_that_was_carried_out_late_is_found_at_the_second_beat(client: redis.Redis, valkey: str) -> None:
    beating = Beating(client, valkey)
    beating.worker.heart.beat()
    beating.submit()
    beating.pull()
    hidden = beating.submit()
    # No error has told the worker of it: the command was on its way when the held list was looked at.
    beating.store.pull("w", [QUEUE], 1)
    beating.worker.heart.beat()
    beating.worker.heart.beat()
    assert client.lrange(f"rq:queue:{QUEUE}", 0, -1) == [hidden.encode()]
    assert client.llen(held_key("w")) == 1


def roll_back(client: redis.Redis, beating: Beating, dump: dict[bytes, bytes]) -> None:
    """Another server answers, with an earlier state."""
    client.flushall()
    for key, value in dump.items():
        client.restore(key, 0, value)
    beating.worker.holdings.run_id = "the one before"


def saved(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.keys("*")}


def test_a_worker_registers_what_it_holds_with_a_server_that_forgot_it(client: redis.Redis, valkey: str) -> None:
    beating = Beating(client, valkey)
    beating.worker.heart.beat()
    before = saved(client)
    jobs = [beating.submit(), beating.submit()]
    beating.pull()
    beating.engine.tick()
    roll_back(client, beating, before)
    beating.worker.heart.beat()
    assert not beating.ended() and len(beating.engine.pool.active) == 2
    assert {i.decode() for i in client.lrange(held_key("w"), 0, -1)} == set(jobs)
    assert [beating.store.fetch(job_id).status for job_id in jobs] == ["running", "running"]
    assert client.llen(f"rq:queue:{QUEUE}") == 0


def test_a_worker_drops_what_was_cancelled_in_a_server_that_forgot_that_it_runs(
    client: redis.Redis, valkey: str
) -> None:
    beating = Beating(client, valkey)
    beating.worker.heart.beat()
    job_id = beating.submit()
    before = saved(client)
    beating.pull()
    beating.engine.tick()
    roll_back(client, beating, before)
    beating.store.cancel(job_id)
    beating.worker.heart.beat()
    beating.engine.tick()
    assert not beating.engine.pool.active and not beating.worker.held
    assert beating.store.view(job_id)["status"] == "cancelled"


def test_an_end_that_a_server_forgot_is_committed_and_recorded_again(client: redis.Redis, valkey: str) -> None:
    beating = Beating(client, valkey)
    worker = beating.worker
    worker.heart.beat()
    job_id = beating.submit(max_tokens=5)
    beating.pull()
    before = saved(client)
    worker.finaliser.start()
    worker.publisher.start()
    try:
        for _ in range(10):
            beating.engine.tick()
        eventually(lambda: beating.store.fetch(job_id).rq_status == "finished" and not worker.held, "it has ended")
        view, log = beating.store.view(job_id), client.xrange(events_key(job_id))
        roll_back(client, beating, before)
        assert beating.store.fetch(job_id).rq_status == "started"
        worker.heart.beat()
        eventually(lambda: beating.store.fetch(job_id).rq_status == "finished" and not worker.held, "it ends again")
    finally:
        worker.publisher.stop()
        worker.finaliser.stop()
    assert (beating.store.view(job_id), client.xrange(events_key(job_id))) == (view, log)
    assert client.llen(held_key("w")) == 0 and client.llen(f"rq:queue:{QUEUE}") == 0
