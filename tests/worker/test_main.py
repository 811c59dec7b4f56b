"""What a parent does beside keeping a model process going."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError

from shared.jobs import JobStore
from shared.settings import WorkerSettings, load
from tests.shared.world import World
from worker import main
from worker.main import Undertaker
from worker.recovery import Recovery


@pytest.fixture
def world(store: JobStore, client: redis.Redis) -> World:
    return World(store, client)


@pytest.fixture
def undertaker(store: JobStore, valkey: str) -> Undertaker:
    settings = load(WorkerSettings, {"model_path": "fake:echo", "redis_url": valkey, "lease_s": 600})
    return Undertaker(Recovery(store, settings))


def look_again(undertaker: Undertaker) -> None:
    """Look as if it were time to."""
    undertaker._next = 0.0
    undertaker.look()


def test_what_a_model_process_held_is_given_back_at_once(undertaker: Undertaker, world: World) -> None:
    world.store.renew_lease("w1", 600)
    pulled = world.take("w1")
    undertaker.bury("w1", [pulled.execution])
    assert world.waiting() == [pulled.record.id]
    assert world.store.fetch(pulled.record.id).crashes == 1


def test_a_process_that_never_had_a_name_held_nothing(undertaker: Undertaker, world: World) -> None:
    world.take("w1")
    undertaker.bury("", [])
    assert len(world.held("w1")) == 1


def test_what_redis_did_not_answer_is_tried_again_and_counts_once(
    undertaker: Undertaker, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = world.take("w1")
    bury, tries = world.store.bury, []

    def lose_the_first_reply(dead: str, blamed: list[str]) -> Any:
        tries.append(dead)
        found = bury(dead, blamed)
        if len(tries) == 1:
            raise ConnectionError("the reply was lost")
        return found

    monkeypatch.setattr(world.store, "bury", lose_the_first_reply)
    undertaker.bury("w1", [pulled.execution])
    for _ in range(3):
        look_again(undertaker)
    assert tries == ["w1", "w1"]
    assert world.waiting() == [pulled.record.id]
    assert world.store.fetch(pulled.record.id).crashes == 1


def test_redis_is_not_asked_more_often_than_once_a_round(
    undertaker: Undertaker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(undertaker._recovery, "check_writable", asked.append)
    now = [100.0]
    monkeypatch.setattr(main.time, "monotonic", lambda: now[0])
    for now[0] in (100.0, 100.5, 100.9, 101.1):
        undertaker.look()
    assert len(asked) == 2
