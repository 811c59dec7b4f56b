"""How many jobs of each priority a worker may take beside those it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.room import TURN_S, Workload

INTERACTIVE, NORMAL, BATCH = range(3)


def job(name: str, priority: int, rank: int | None = None, queue: str = "q") -> Any:
    """A held job, as far as it is looked at."""
    record, execution = SimpleNamespace(origin=queue), SimpleNamespace(id=name)
    return SimpleNamespace(
        record=record,
        execution=execution,
        priority=priority,
        rank=priority if rank is None else rank,
        runs_alone=False,
    )


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def workload(now: list[float]) -> Workload:
    return Workload(4, clock=lambda: now[0])


def fill(workload: Workload, *priorities: int) -> None:
    for number, priority in enumerate(priorities):
        workload.add(job(f"{priority}-{number}", priority))


def test_an_idle_worker_has_room_for_as_many_as_it_has_slots(workload: Workload) -> None:
    assert workload.room() == [4, 4, 4]


def test_a_full_worker_has_room_for_what_is_more_urgent(workload: Workload) -> None:
    fill(workload, BATCH, BATCH, BATCH, BATCH)
    assert workload.room() == [4, 4, 0]


def test_a_job_takes_room_from_those_that_are_no_more_urgent(workload: Workload) -> None:
    fill(workload, NORMAL)
    assert workload.room() == [4, 3, 3]


def test_jobs_that_were_displaced_count_until_they_are_given_up(workload: Workload) -> None:
    fill(workload, BATCH, BATCH, BATCH, BATCH, INTERACTIVE, INTERACTIVE, NORMAL)
    assert workload.room() == [2, 1, 0]
    workload.remove("0-4")
    assert workload.room() == [3, 2, 0]
    for number in range(4):
        workload.remove(f"2-{number}")
    assert workload.room() == [3, 2, 2]


def test_removing_what_is_not_there_is_nothing(workload: Workload) -> None:
    fill(workload, NORMAL)
    workload.remove("another")
    assert len(workload) == 1


@given(st.lists(st.sampled_from([INTERACTIVE, NORMAL, BATCH]), max_size=30))
def test_no_job_is_taken_beyond_the_slots_that_it_could_have(priorities: list[int]) -> None:
    workload = Workload(4)
    held: list[int] = []
    for number, priority in enumerate(priorities):
        as_urgent = sum(other <= priority for other in held)
        assert workload.room()[priority] == max(0, 4 - as_urgent)
        if as_urgent < 4:
            workload.add(job(str(number), priority))
            held.append(priority)


def test_a_job_taken_before_its_time_counts_as_urgent_as_its_rank_every_other_turn(
    workload: Workload, now: list[float]
) -> None:
    workload.add(job("old", BATCH, rank=INTERACTIVE))
    assert workload.room() == [3, 3, 3]
    now[0] += TURN_S
    assert workload.room() == [4, 4, 3]
    now[0] += TURN_S
    assert workload.room() == [3, 3, 3]


def test_one_job_at_a_time_is_taken_before_its_time(workload: Workload, now: list[float]) -> None:
    fill(workload, BATCH, INTERACTIVE)
    assert workload.lends
    workload.add(job("old", BATCH, rank=NORMAL))
    assert not workload.lends
    now[0] += TURN_S
    assert not workload.lends
    workload.remove("old")
    assert workload.lends


def test_jobs_are_counted_by_queue(workload: Workload) -> None:
    for name, queue in (("1", "a"), ("2", "b"), ("3", "a")):
        workload.add(job(name, NORMAL, queue=queue))
    assert workload.by_queue() == {"a": 2, "b": 1}


def test_beside_a_job_that_runs_alone_there_is_no_room_and_no_slot_to_rely_on(workload: Workload) -> None:
    lone = job("lone", BATCH)
    lone.runs_alone = True
    workload.add(lone)
    assert workload.room() == [0, 0, 0] and workload.free == 0
    workload.remove("lone")
    assert workload.room() == [4, 4, 4] and workload.free == 4
