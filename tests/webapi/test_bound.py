from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from shared.jobs import JobStore
from shared.names import web_lease_key
from shared.schemas import JobRequest
from shared.settings import Settings
from tests.processes import eventually
from tests.webapi.conftest import web_settings
from webapi.bound import Bound


@pytest.fixture
def bound(client: redis.Redis, store: JobStore, settings: Settings) -> Iterator[Bound]:
    """One whose lease is short, so that it is renewed every 50 ms."""
    bound = Bound(web_settings(settings, bound_lease_s=0.2), client, store)
    yield bound
    bound.close()


def lease_ms(client: Any, bound: Bound) -> int:
    return int(client.pttl(web_lease_key(bound.id)))


def test_the_lease_is_there_once_it_is_held(client: redis.Redis, bound: Bound) -> None:
    assert lease_ms(client, bound) < 0
    bound.enter()
    assert 0 < lease_ms(client, bound) <= 200
    bound.leave()


def test_the_lease_is_renewed_while_it_is_held(client: redis.Redis, bound: Bound) -> None:
    bound.enter()
    for _ in range(5):
        client.delete(web_lease_key(bound.id))
        assert eventually(lambda: lease_ms(client, bound) > 0, "the lease is renewed")
    bound.leave()


def test_an_outage_of_redis_does_not_end_the_renewals(
    client: redis.Redis, bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound.enter()
    with monkeypatch.context() as outage:
        failures = []

        def fail(*args: Any, **kwargs: Any) -> None:
            failures.append(args)
            raise redis.ConnectionError("gone")

        outage.setattr(bound._client, "pexpire", fail)
        assert eventually(lambda: len(failures) >= 3, "it keeps trying")
    client.delete(web_lease_key(bound.id))
    assert eventually(lambda: lease_ms(client, bound) > 0, "the lease is renewed")
    bound.leave()


def test_without_redis_the_lease_cannot_be_held(settings: Settings, store: JobStore) -> None:
    dead = redis.Redis(port=1, retry=None)
    bound = Bound(web_settings(settings), dead, store)
    with pytest.raises(redis.ConnectionError):
        bound.enter()
    bound.close()


def test_a_closed_process_gives_its_lease_up_at_once(client: redis.Redis, store: JobStore, settings: Settings) -> None:
    bound = Bound(web_settings(settings, bound_lease_s=600), client, store)
    bound.enter()
    bound.close()
    assert lease_ms(client, bound) < 0


def test_unwanted_jobs_are_cancelled_and_those_that_are_over_or_gone_passed_over(store: JobStore, bound: Bound) -> None:
    first, second = (store.submit(JobRequest(prompt="a"), "tiny").job_id for _ in range(2))
    store.cancel(first)
    bound.end([first, "nobody", second])
    assert store.fetch(second).status == "cancelled"


def test_jobs_that_cannot_be_cancelled_now_are_cancelled_once_redis_is_back(
    store: JobStore, bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = store.submit(JobRequest(prompt="a"), "tiny").job_id
    cancel_many, failures = store.cancel_many, iter(range(3))

    def refuse(job_ids: list[str]) -> None:
        if next(failures, None) is not None:
            raise redis.ConnectionError("gone")
        cancel_many(job_ids)

    monkeypatch.setattr(store, "cancel_many", refuse)
    bound.end([job_id])
    assert store.fetch(job_id).status == "queued"
    eventually(lambda: store.fetch(job_id).status == "cancelled", "it is cancelled later")
