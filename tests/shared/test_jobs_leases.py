"""Handing back, and taking back what a dead worker held."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from rq.executions import Execution
from rq.job import JobStatus
from rq.registry import StartedJobRegistry

from shared.names import SERIALIZER, queue_name
from shared.records import SlotTime
from shared.work import Reclaimed
from tests.shared.world import MODEL, NORMAL, World, until

# --- hand back ---


def test_jobs_go_back_to_the_front_in_the_order_given(world: World) -> None:
    ids = [world.submit() for _ in range(5)]
    pulled = world.pull(count=3)
    world.store.hand_back("w1", [(p.record.id, p.execution) for p in pulled])
    assert world.waiting() == ids
    assert world.held() == []
    assert [p.record.id for p in world.pull("w2", count=9)] == ids


def test_each_job_goes_back_to_the_queue_it_came_from(world: World) -> None:
    ids = {p: world.submit(priority=p) for p in ("batch", "interactive", "normal")}
    pulled = world.pull(count=9)
    world.store.hand_back("w1", [(p.record.id, p.execution) for p in pulled])
    assert {p: world.waiting(queue_name(MODEL, p)) for p in ids} == {p: [i] for p, i in ids.items()}


def test_a_job_handed_back_is_queued_again_and_keeps_its_text(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a", "b")
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    shown = world.store.view(pulled.record.id)
    assert (shown["status"], shown["detail"], shown["position"], shown["text"]) == ("queued", "queued", 1, "ab")
    (again,) = world.pull("w2")
    assert world.say(again, "c", start=2) == []
    assert [t["text"] for t in world.store.stream.tokens(pulled.record.id)] == ["a", "b", "c"]


def test_handing_back_wakes_a_worker(world: World) -> None:
    pulled = world.take()
    world.client.delete(f"slotline:doorbell:{MODEL}:normal")
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    assert world.client.llen(f"slotline:doorbell:{MODEL}:normal") == 1


def test_the_time_in_slots_goes_back_with_a_job_and_what_is_not_known_is_left_as_it_was_noted(world: World) -> None:
    known, noted = world.take(), world.take()
    world.store.note_slot_times({(noted.record.id, noted.execution): SlotTime(1.5, 0.25)})
    jobs = [(p.record.id, p.execution) for p in (known, noted)]
    world.store.hand_back("w1", jobs, {known.execution: SlotTime(2.5)})
    assert [p.record.slot_time for p in world.pull("w2", count=2)] == [SlotTime(2.5), SlotTime(1.5, 0.25)]


def test_the_time_in_slots_outlives_the_worker_that_noted_it(world: World) -> None:
    pulled = world.take("w1")
    assert pulled.record.slot_time == SlotTime(0.0)
    for seconds in (1.0, 2.0):
        world.store.note_slot_times({(pulled.record.id, pulled.execution): SlotTime(seconds)})
    world.store.renew_lease("w1", 100)
    world.client.delete("slotline:lease:w1")
    world.store.reclaim("w2")
    (again,) = world.pull("w2")
    assert again.record.slot_time == SlotTime(2.0)


def test_nobody_but_the_owner_notes_time_in_slots(world: World) -> None:
    stolen, ended, gone = (world.take() for _ in range(3))
    world.client.hset(f"rq:job:{stolen.record.id}", "sl_exec", "other")
    world.end(ended)
    world.job(gone.record.id).delete()
    world.store.note_slot_times({(p.record.id, p.execution): SlotTime(9.0) for p in (stolen, ended, gone)})
    assert [world.field(p.record.id, "sl_used_ms") for p in (stolen, ended, gone)] == [None] * 3
    assert not world.client.exists(f"rq:job:{gone.record.id}")


def test_a_job_that_runs_from_the_start_has_all_its_time_again(world: World) -> None:
    ids = []
    for _ in range(2):
        pulled = world.take()
        world.store.note_slot_times({(pulled.record.id, pulled.execution): SlotTime(9.0, 1.0)})
        world.end(pulled, "failed")
        world.record(pulled, JobStatus.FAILED)
        ids.append(pulled.record.id)
    world.store.retry(ids[0])
    world.job(ids[1]).requeue()
    again = world.pull(count=2)
    assert [(p.record.id, p.record.slot_time) for p in again] == [(i, SlotTime(0.0)) for i in ids]


def test_only_what_one_still_owns_goes_back(world: World) -> None:
    mine, stolen, committed, deleted, stopped = (world.take() for _ in range(5))
    world.client.hset(f"rq:job:{stolen.record.id}", "sl_exec", "other")
    world.end(committed)
    world.job(deleted.record.id).delete()
    world.job(stopped.record.id).set_status(JobStatus.STOPPED)
    jobs = (stolen, committed, mine, deleted, stopped)
    world.store.hand_back("w1", [(p.record.id, p.execution) for p in jobs])
    assert world.waiting() == [mine.record.id]
    assert world.held() == []
    assert world.field(stolen.record.id, "status") == "started"
    assert world.store.view(committed.record.id)["status"] == "completed"


def test_handing_back_twice_queues_once(world: World) -> None:
    pulled = world.take()
    for _ in range(2):
        world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    assert world.waiting() == [pulled.record.id]


def test_handing_back_nothing_is_nothing(world: World) -> None:
    world.store.hand_back("w1", [])
    assert world.keys() == set()


# --- leases ---


def test_a_lease_lasts_as_long_as_it_was_told_and_is_renewed(world: World) -> None:
    world.store.renew_lease("w1", 0.5)
    assert 0 < world.client.pttl("slotline:lease:w1") <= 500
    world.store.renew_lease("w1", 100)
    assert world.client.pttl("slotline:lease:w1") > 90_000
    assert world.client.smembers("slotline:workers") == {b"w1"}


def test_nothing_is_taken_from_a_worker_before_its_lease_has_run_out(world: World) -> None:
    world.store.renew_lease("w1", 0.3)
    pulled = world.take("w1")
    taken: list[tuple[bool, list[str]]] = []

    def reclaim() -> bool:
        alive_before = bool(world.client.exists("slotline:lease:w1"))
        queued = world.store.reclaim("w2").queued
        taken.append((alive_before and bool(world.client.exists("slotline:lease:w1")), queued))
        return bool(queued)

    until(reclaim)
    assert taken[0] == (True, [])
    assert all(queued == [] for alive, queued in taken if alive)
    assert taken[-1] == (False, [pulled.record.id])


def dies(world: World, worker: str = "w1") -> None:
    world.store.renew_lease(worker, 100)
    world.expire(f"slotline:lease:{worker}")


def test_what_a_dead_worker_held_goes_back_to_the_front_in_order(world: World) -> None:
    ids = [world.submit() for _ in range(5)]
    world.pull("w1", count=3)
    dies(world)
    found = world.store.reclaim("w2")
    assert sorted(found.queued) == sorted(ids[:3])
    assert found.committed == []
    assert world.waiting() == ids
    assert [p.record.id for p in world.pull("w2", count=9)] == ids


def test_a_lease_that_is_renewed_at_the_last_moment_is_respected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store.renew_lease("w1", 100)
    world.take("w1")
    monkeypatch.setattr(world.client, "exists", lambda *_: 0)  # the look just before it was renewed
    assert world.store.reclaim("w2") == Reclaimed()
    assert len(world.held("w1")) == 1


def test_a_job_taken_back_is_nobodys_until_it_is_pulled_again(world: World) -> None:
    pulled = world.take("w1")
    dies(world)
    world.store.reclaim("w2")
    assert world.say(pulled, "stale") == [pulled.execution]
    assert world.end(pulled) == "lost"


def test_a_job_taken_back_keeps_its_text_and_counts_the_attempt(world: World) -> None:
    pulled = world.take("w1")
    world.say(pulled, "a")
    dies(world)
    world.store.reclaim("w2")
    assert world.store.view(pulled.record.id)["text"] == "a"
    (again,) = world.pull("w2")
    assert (again.record.attempts, again.record.worker) == (2, "w2")
    assert world.say(pulled, "stale", start=1) == [pulled.execution]


def test_taking_back_wakes_a_worker_and_forgets_the_dead_one(world: World) -> None:
    world.take("w1")
    world.client.delete(f"slotline:doorbell:{MODEL}:normal")
    dies(world)
    world.store.reclaim("w2")
    assert world.client.llen(f"slotline:doorbell:{MODEL}:normal") == 1
    assert world.client.smembers("slotline:workers") == set()
    assert not world.client.exists("slotline:held:w1")
    assert world.store.reclaim("w2") == Reclaimed()


def test_a_job_whose_end_was_committed_is_given_apart_and_not_run_again(world: World) -> None:
    done, running = world.take("w1"), world.take("w1")
    world.end(done)
    dies(world)
    assert world.store.reclaim("w2") == Reclaimed(queued=[running.record.id], committed=[done.record.id])
    assert world.waiting() == [running.record.id]
    assert world.held("w2") == [done.record.id]
    assert world.store.fetch(done.record.id).worker == "w2"
    assert world.store.view(done.record.id)["status"] == "completed"


def test_a_committed_job_whose_second_keeper_dies_too_is_given_on(world: World) -> None:
    done = world.take("w1")
    world.end(done)
    dies(world)
    world.store.reclaim("w2")
    dies(world, "w2")
    assert world.store.reclaim("w3") == Reclaimed(committed=[done.record.id])
    assert world.held("w3") == [done.record.id]


def test_what_has_ended_or_moved_on_is_not_queued_again(world: World) -> None:
    recorded, deleted, cancelled, moved = (world.take("w1") for _ in range(4))
    world.end(recorded)
    world.job(recorded.record.id).set_status(JobStatus.FINISHED)
    world.job(deleted.record.id).delete()
    world.job(cancelled.record.id).cancel()
    world.client.hset(f"rq:job:{moved.record.id}", "worker_name", "w9")
    dies(world)
    assert world.store.reclaim("w2") == Reclaimed()
    assert world.waiting() == []


def test_rqs_registrations_of_a_dead_workers_executions_are_removed(world: World) -> None:
    pulled = world.take("w1")
    job = world.job(pulled.record.id)
    execution = Execution(pulled.execution, job.id, world.client)
    with world.client.pipeline() as pipe:
        execution.save(1000, pipeline=pipe)
        job.started_job_registry.add_execution(execution, pipeline=pipe, ttl=1000)
        job.execution_registry.add(execution, ttl=1000, pipeline=pipe)
        pipe.execute()
    dies(world)
    world.store.reclaim("w2")
    assert StartedJobRegistry(NORMAL, world.client, serializer=SERIALIZER).get_job_ids(cleanup=False) == []
    assert not world.client.exists(execution.key)
    assert job.get_executions() == []


def test_whoever_holds_a_job_is_known_though_it_never_renewed_a_lease(world: World) -> None:
    # As after a takeover while it was only slow, or where Redis has lost its last second.
    world.store.renew_lease("w1", 100)
    world.client.srem("slotline:workers", "w1")
    pulled = world.take("w1")
    assert world.store.reclaim("w2") == Reclaimed()
    world.client.delete("slotline:lease:w1")
    assert world.store.reclaim("w2").queued == [pulled.record.id]


def test_somebody_who_cannot_record_leaves_what_is_to_be_recorded_to_others(world: World) -> None:
    done, running = world.take("w1"), world.take("w1")
    world.end(done)
    dies(world)
    assert world.store.reclaim("") == Reclaimed(queued=[running.record.id])
    assert world.store.reclaim("") == Reclaimed()
    assert world.held("w1") == [done.record.id]
    assert world.store.reclaim("w2") == Reclaimed(committed=[done.record.id])
    assert world.client.smembers("slotline:workers") == set()


def test_what_is_taken_back_spends_no_retry(world: World) -> None:
    pulled = world.take("w1", retries=3)
    dies(world)
    world.store.reclaim("w2")
    assert world.store.fetch(pulled.record.id).retries_left == 3


def test_a_cancelled_job_that_is_taken_back_is_named(world: World) -> None:
    pulled = world.take("w1")
    world.store.cancel(pulled.record.id)
    dies(world)
    assert world.store.reclaim("w2") == Reclaimed([pulled.record.id], cancelled=[pulled.record.id])


def test_a_worker_does_not_take_back_its_own_jobs(world: World) -> None:
    world.take("w1")
    dies(world)
    assert world.store.reclaim("w1") == Reclaimed()
    assert len(world.held("w1")) == 1


def test_workers_that_take_back_at_once_queue_each_job_once(world: World) -> None:
    ids = [world.submit() for _ in range(20)]
    world.pull("w1", count=20)
    dies(world)
    barrier = Barrier(6)

    def reclaim(name: str) -> list[str]:
        barrier.wait(timeout=10)
        return world.store.reclaim(name).queued

    with ThreadPoolExecutor(6) as pool:
        queued = [i for got in pool.map(reclaim, [f"v{i}" for i in range(6)]) for i in got]
    assert sorted(queued) == sorted(ids)
    assert world.waiting() == ids


@pytest.mark.parametrize("holds", [True, False], ids=["with jobs", "empty-handed"])
def test_a_worker_that_leaves_is_forgotten_once_it_holds_nothing(holds: bool, world: World) -> None:
    world.store.renew_lease("w1", 100)
    pulled = world.take("w1") if holds else None
    world.store.drop_lease("w1")
    assert world.client.smembers("slotline:workers") == ({b"w1"} if holds else set())
    assert world.store.reclaim("w2").queued == ([pulled.record.id] if pulled else [])
