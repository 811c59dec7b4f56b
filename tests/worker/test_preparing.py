"""From a held job to a request: what the queue adds to what the intake makes of the payload."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from rq.utils import now, utcformat

from shared.records import SlotTime
from shared.stream import token_data
from tests.worker.beating import Beating
from worker.requests import Ended, Request


@pytest.fixture
def beating(client: redis.Redis, valkey: str) -> Beating:
    return Beating(client, valkey, n_parallel=1, pause_s=0, age_s=100)


def requests(beating: Beating) -> dict[str, Request]:
    """What the engine has been given, by job."""
    beating.engine._receive()
    return {request.id: request for request in beating.engine.waiting}


def age(beating: Beating, job_id: str, seconds: float) -> None:
    beating.client.hset(f"rq:job:{job_id}", "enqueued_at", utcformat(now() - timedelta(seconds=seconds)))


@pytest.mark.parametrize(("priority", "place"), [("interactive", 0), ("normal", 1), ("batch", 2)])
def test_a_request_says_how_urgent_it_is_and_what_queue_it_came_from(
    beating: Beating, priority: str, place: int
) -> None:
    job_id = beating.submit(priority=priority)
    beating.pull()
    request = requests(beating)[job_id]
    assert (request.priority, request.rank, request.queue) == (place, place, f"fake-count:{priority}:default")


def test_age_changes_the_rank_and_not_the_priority(beating: Beating) -> None:
    old = beating.submit(priority="batch")
    age(beating, old, 1000)
    beating.submit(priority="interactive")
    beating.pull()
    request = requests(beating)[old]
    assert (request.priority, request.rank) == (2, 0)


def test_a_job_that_waited_too_long_in_its_queue_is_refused(beating: Beating) -> None:
    job_id = beating.submit(queue_timeout_s=10)
    age(beating, job_id, 11)
    beating.pull()
    (ended,) = [e for e in beating.events if isinstance(e, Ended)]
    assert ended.request.id == job_id and ended.error is not None and ended.error.code == "queue_timeout"


@pytest.mark.parametrize("began", [True, False])
def test_one_that_had_a_slot_before_has_not_come_too_late(beating: Beating, began: bool) -> None:
    job_id = beating.submit(queue_timeout_s=10)
    (pulled,) = beating.store.pull("other", ["fake-count:normal:default"], 1)
    if began:
        beating.client.xadd(f"slotline:events:{job_id}", {"event": "started", "data": "{}"}, id="0-*")
    beating.store.hand_back("other", [(job_id, pulled.execution)])
    age(beating, job_id, 11)
    beating.pull()
    assert (job_id in requests(beating)) == began


def test_what_another_worker_began_goes_on_with_its_time_in_slots_and_is_not_started_again(beating: Beating) -> None:
    fresh, begun = beating.submit(), beating.submit()
    pulled = {p.record.id: p for p in beating.store.pull("other", ["fake-count:normal:default"], 2)}
    beating.client.xadd(f"slotline:events:{begun}", {"event": "started", "data": "{}"}, id="0-*")
    jobs = [(job_id, pulled[job_id].execution) for job_id in (fresh, begun)]
    beating.store.hand_back("other", jobs, {pulled[begun].execution: SlotTime(7.25, 1.5)})
    beating.pull()
    beating.pull()
    (request,) = [r for r in requests(beating).values() if r.id == fresh]
    assert (request.has_started, request.slot_time) == (False, SlotTime(0.0))
    beating.engine.cancel(request.execution)
    beating.engine.tick()
    beating.pull()
    request = requests(beating)[begun]
    assert (request.has_started, request.slot_time) == (True, SlotTime(7.25, 1.5))


def test_a_job_is_noted_while_it_is_prepared(beating: Beating, monkeypatch: pytest.MonkeyPatch) -> None:
    intake, box, noted = beating.worker.intake, beating.engine.box, []
    prepare = intake.prepare

    def prepare_and_look(*args: Any, **kwargs: Any) -> Any:
        noted.extend(box.executions)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(intake, "prepare", prepare_and_look)
    beating.submit()
    beating.pull()
    (held,) = beating.worker.held.values()
    assert noted == [held.execution.id] and box.executions == []


@pytest.mark.parametrize(("first", "goes_on"), [(0, True), (1, False)])
def test_a_job_whose_log_has_lost_its_beginning_does_not_go_on_from_the_rest(
    beating: Beating, first: int, goes_on: bool
) -> None:
    job_id = beating.submit()
    (pulled,) = beating.store.pull("other", ["fake-count:normal:default"], 1)
    for index in range(first, 3):
        event = {"event": "token", "data": token_data(index, "1", 49)}
        beating.client.xadd(f"slotline:events:{job_id}", event, id=f"{index + 1}-0")
    beating.store.hand_back("other", [(job_id, pulled.execution)])
    beating.pull()
    assert (job_id in requests(beating)) == goes_on
    errors = [e.error.message for e in beating.events if isinstance(e, Ended) and e.error is not None]
    assert errors == ([] if goes_on else ["the job cannot go on, since a part of its log is gone; retry it"])
