"""What a worker does every second, beat by beat on a clock of the test's own, against a real server."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from rq import Queue
from rq.job import Job

from shared.names import JOB_FUNCTION, PRIORITIES, SERIALIZER, live_queues_key, queue_name, web_lease_key
from shared.schemas import JobRequest
from tests.worker.beating import Beating
from worker import heartbeat, recovery
from worker.held import HeldJob, hold, orphans
from worker.slot_worker import LOOK_S

QUEUE = queue_name("fake-count", "normal")
#: Until then leases are not trusted: whoever was cut off needs so long to notice and to come back.
TRUST_S = 6.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the heartbeat; the test moves it."""
    clock = [1000.0]
    for module in (heartbeat, recovery):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0]))
    return clock


@pytest.fixture
def beating(client: redis.Redis, valkey: str, now: list[float]) -> Beating:
    return Beating(client, valkey)


def beat(beating: Beating, now: list[float], after_s: float) -> None:
    """Beat every second of some, as a worker does that is well, and tick after the last."""
    while after_s > 1:
        now[0], after_s = now[0] + 1, after_s - 1
        beating.worker.heart.beat()
    now[0] += after_s
    beating.worker.heart.beat()
    beating.engine.tick()


def test_a_running_job_ends_once_the_web_process_it_is_for_has_no_lease(
    beating: Beating, now: list[float], client: redis.Redis
) -> None:
    client.set(web_lease_key("web-1"), "1")
    client.set(web_lease_key("web-2"), "1")
    jobs = {name: beating.submit(bound=name) for name in ("web-1", "web-2")}
    alone = beating.submit()
    beat(beating, now, 0)
    beating.pull()
    beat(beating, now, TRUST_S)
    assert len(beating.engine.pool.active) == 3 and not beating.ended()
    client.delete(web_lease_key("web-1"))
    beat(beating, now, 1)
    assert beating.ended() == {jobs["web-1"]: "cancelled"}
    assert {s.request.id for s in beating.engine.pool.active if s.request} == {jobs["web-2"], alone}


def test_a_job_pulled_for_nobody_never_gets_a_slot(beating: Beating, now: list[float]) -> None:
    beat(beating, now, 0)
    beat(beating, now, TRUST_S)
    job_id = beating.submit(bound="web-1")
    beating.pull()
    beating.engine.tick()
    assert beating.ended() == {job_id: "cancelled"}
    assert beating.engine.ticks == 0


def test_no_caller_is_given_up_before_redis_was_healthy_for_long_enough(beating: Beating, now: list[float]) -> None:
    beating.submit(bound="web-1")
    beat(beating, now, 0)
    beating.pull()
    beat(beating, now, TRUST_S - 0.1)
    assert not beating.ended()
    # Redis was away: the lease ran out for nothing, and its owner gets the time to renew it.
    beating.worker.heart.note_outage()
    beat(beating, now, 1)
    beat(beating, now, TRUST_S - 0.1)
    assert not beating.ended() and len(beating.engine.pool.active) == 1
    beat(beating, now, 0.2)
    assert list(beating.ended().values()) == ["cancelled"]


def test_nobody_is_given_up_because_the_machine_slept(
    beating: Beating, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = [0.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0] + slept[0])
    monkeypatch.setattr(recovery, "time", clocks)
    beating.client.set(web_lease_key("web-1"), "1")
    beating.submit(bound="web-1")
    beat(beating, now, 0)
    beating.pull()
    beat(beating, now, TRUST_S)
    beating.client.delete(web_lease_key("web-1"))
    slept[0] = 3600.0
    beat(beating, now, 1)
    beat(beating, now, TRUST_S - 0.1)
    assert not beating.ended()
    beat(beating, now, 0.2)
    assert list(beating.ended().values()) == ["cancelled"]


def test_each_web_process_is_asked_for_once(
    beating: Beating, now: list[float], client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set(web_lease_key("web-1"), "1")
    for _ in range(3):
        beating.submit(bound="web-1")
    beat(beating, now, 0)
    beating.pull()
    asked: list[str] = []

    def counting(jobs: Any, pipe: Any) -> list[str]:
        asked.extend(found := ask(jobs, pipe))
        return found

    ask = heartbeat.ask_for_leases
    monkeypatch.setattr(heartbeat, "ask_for_leases", counting)
    beat(beating, now, TRUST_S)
    assert asked == ["web-1"]


def test_a_job_cancelled_while_it_waited_for_the_intake_never_gets_a_slot(beating: Beating, now: list[float]) -> None:
    beat(beating, now, 0)
    job_id = beating.submit()
    (pulled,) = beating.store.pull("w", [QUEUE], 1)
    pulled = replace(pulled, record=replace(pulled.record, cancelling=True))
    (held,) = hold([pulled], beating.client, "w", beating.worker.settings)
    beating.preparer.put([held])
    beating.preparer.put(None)  # type: ignore[arg-type]
    beating.preparer._run()
    beating.engine.tick()
    assert beating.ended() == {job_id: "cancelled"} and beating.engine.ticks == 0


def test_a_cancel_whose_message_was_lost_is_found_in_the_record(
    beating: Beating, now: list[float], client: redis.Redis
) -> None:
    job_id = beating.submit()
    beat(beating, now, 0)
    beating.pull()
    client.hset(f"rq:job:{job_id}", "sl_cancel", "1")
    beat(beating, now, 1)
    assert beating.ended() == {job_id: "cancelled"}


def test_a_job_with_another_owner_is_dropped_without_a_word(
    beating: Beating, now: list[float], client: redis.Redis
) -> None:
    job_id = beating.submit()
    beat(beating, now, 0)
    beating.pull()
    beating.engine.tick()
    client.hset(f"rq:job:{job_id}", "sl_exec", "another")
    beat(beating, now, 1)
    assert not beating.ended() and not beating.engine.pool.active and not beating.worker.held


def test_a_beat_is_due_a_second_after_the_last(beating: Beating, now: list[float]) -> None:
    assert beating.worker.heart.is_due
    beat(beating, now, 0)
    assert not beating.worker.heart.is_due
    now[0] += recovery.ROUND_S
    assert beating.worker.heart.is_due


def test_a_short_lease_is_renewed_before_it_runs_out_and_trusted_in_time(
    client: redis.Redis, valkey: str, now: list[float]
) -> None:
    beating = Beating(client, valkey, lease_s=0.9, redis_timeout_s=0.1)
    began = now[0]
    while now[0] < began + 1.2:
        beat(beating, now, 0.0)
        assert not beating.worker.heart.is_due
        now[0] += 0.9 / 3 + 0.01
        assert beating.worker.heart.is_due
    assert beating.worker.heart.trusts_leases


def test_queues_are_followed_by_priority(beating: Beating, now: list[float]) -> None:
    for priority in PRIORITIES:
        beating.store.submit(JobRequest(prompt="x", priority=priority), "fake-count")
    beat(beating, now, 0)
    heart = beating.worker.heart
    assert heart.queue_depth == beating.engine.queue_depth == 3
    assert heart.queues == [[queue_name(m, p) for m in ("fake-count", "default")] for p in PRIORITIES]


def test_queues_that_were_made_with_rq_are_followed_by_their_name(
    beating: Beating, now: list[float], client: redis.Redis
) -> None:
    ours = ["fake-count:normal:acme", "fake-count:batch:acme", "default:normal:acme", "fake-count"]
    others = ["default", "high", "another:normal:acme", "another", "fake-count:urgent:acme", "fake-count:normal:a:b"]
    for name in ours + others:
        Queue(name, connection=client, serializer=SERIALIZER).enqueue(JOB_FUNCTION, {"prompt": "x"})
    beat(beating, now, 0)
    heart = beating.worker.heart
    assert set().union(*heart.queues) - set(beating.worker.queue_names()) == set(ours)
    assert "fake-count:batch:acme" in heart.queues[2] and "fake-count" in heart.queues[1]
    assert heart.live_queues == heart.queue_depth == len(ours)
    # They are noted, so that the web side counts what waits in them.
    assert client.smembers(live_queues_key("fake-count")) == {
        b"fake-count:normal:acme",
        b"fake-count:batch:acme",
        b"fake-count",
    }


def test_a_queue_that_is_new_is_pulled_from_at_once(beating: Beating, now: list[float]) -> None:
    beat(beating, now, 0)
    Queue("fake-count:normal:late", connection=beating.client, serializer=SERIALIZER).enqueue(JOB_FUNCTION, {})
    beating.client.sadd(live_queues_key("fake-count"), "fake-count:normal:late")
    beating.pull()
    assert not beating.worker.held
    # Although nothing has rung and the time to look has not come.
    assert beating.worker._work_once() == LOOK_S
    assert [held.record.origin for held in beating.worker.held.values()] == ["fake-count:normal:late"]


def test_orphans_are_told_by_the_replies_at_the_end() -> None:
    def bound(web: str | None) -> HeldJob:
        return SimpleNamespace(record=SimpleNamespace(bound=web))  # type: ignore[return-value]

    jobs = [bound("a"), bound(None), bound("b"), bound("a")]
    assert orphans(jobs, ["a", "b"], [7, 7, 0, 1]) == [jobs[0], jobs[3]]
    assert orphans(jobs, [], [0, 0, 0]) == []


def test_time_in_slots_is_noted_at_each_beat(beating: Beating, now: list[float], client: redis.Redis) -> None:
    job_id = beating.submit()
    beat(beating, now, 0)
    beating.pull()
    beating.engine._clock = lambda: now[0]
    beating.engine.tick()
    now[0] += 5
    beating.engine.tick()
    beat(beating, now, 1)
    assert client.hget(f"rq:job:{job_id}", "sl_used_ms") == b"5000"


def test_a_job_that_has_waited_too_long_is_failed_at_a_beat_though_there_is_no_slot(
    beating: Beating, now: list[float], client: redis.Redis
) -> None:
    beat(beating, now, 0)
    for _ in range(8):
        beating.submit()
    beating.pull()
    beating.engine.tick()
    late = beating.submit(queue_timeout_s=0.001)
    beat(beating, now, 1)
    assert beating.store.view(late)["error"]["code"] == "queue_timeout"


def test_what_rq_cancelled_ends_within_seconds_and_so_does_what_waits_for_it(
    beating: Beating, now: list[float], client: redis.Redis
) -> None:
    beat(beating, now, 0)
    first = beating.submit()
    second = beating.submit(depends_on=first)
    Job.fetch(first, connection=client, serializer=SERIALIZER).cancel()
    beat(beating, now, heartbeat.TIDY_S)
    assert [beating.store.view(i)["status"] for i in (first, second)] == ["cancelled"] * 2
    assert beating.store.stream.last(first) is not None
