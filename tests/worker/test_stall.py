"""When an engine counts as standing still, on a clock of the test's own."""

from __future__ import annotations

import pytest

from worker.stall import MOST_GAP_S, StallWatch


@pytest.fixture
def now() -> list[float]:
    return [50.0]


def stalls(watch: StallWatch, now: list[float], ticks: list[int]) -> list[bool]:
    """Look once a second, at these counts of ticks."""
    found = []
    for count in ticks:
        now[0] += 1
        found.append(watch.has_stalled(count))
    return found


def test_an_engine_that_stands_still_for_too_long_has_stalled(now: list[float]) -> None:
    watch = StallWatch(3, lambda: now[0])
    assert stalls(watch, now, [7, 7, 7, 7, 7]) == [False, False, False, False, True]


def test_one_that_moves_in_between_has_not(now: list[float]) -> None:
    watch = StallWatch(3, lambda: now[0])
    assert not any(stalls(watch, now, [7, 7, 7, 7, 8, 8, 8, 8, 9]))


def test_one_that_is_being_loaded_or_has_ended_need_not_move(now: list[float]) -> None:
    watch = StallWatch(3, lambda: now[0])
    assert not any(stalls(watch, now, [0] * 20))
    assert not any(stalls(watch, now, [5, 5, 0, 0, 0, 0, 0, 0]))


def test_zero_means_never(now: list[float]) -> None:
    watch = StallWatch(0, lambda: now[0])
    assert not any(stalls(watch, now, [7] * 1000))


def test_time_that_nobody_looked_does_not_count(now: list[float]) -> None:
    watch = StallWatch(10, lambda: now[0])
    assert not watch.has_stalled(7)
    now[0] += 3600  # both processes were stopped, and the engine has had no time yet to go round
    assert not watch.has_stalled(7)
    now[0] += 10 - MOST_GAP_S
    assert not watch.has_stalled(7)
    assert stalls(watch, now, [7] * 9)[-1]
