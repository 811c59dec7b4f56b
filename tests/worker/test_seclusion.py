"""A job that is to run alone is begun when nobody is beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.seclusion import Seclusion


def job(name: str, *, alone: bool = False) -> Any:
    return SimpleNamespace(runs_alone=alone, execution=SimpleNamespace(id=name))


class Floor:
    """What a seclusion does to the jobs of a worker."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[str] = []
        self.cleared = 0
        self.seclusion = Seclusion(self._begin, self._clear, 20, lambda: self.now)

    def _begin(self, jobs: Any) -> None:
        self.begun += [held.execution.id for held in jobs]

    def _clear(self) -> None:
        self.cleared += 1


@pytest.fixture
def floor() -> Floor:
    return Floor()


def test_others_are_begun_at_once_and_it_when_they_have_left(floor: Floor) -> None:
    floor.seclusion.put([job("a"), job("lone", alone=True), job("b")])
    assert floor.begun == ["a", "b"]
    for left in (3, 2):
        floor.seclusion.look(left)
    assert floor.begun == ["a", "b"]
    floor.seclusion.look(1)
    floor.seclusion.look(1)
    assert floor.begun == ["a", "b", "lone"] and not floor.cleared


def test_others_are_handed_back_once_if_they_take_too_long(floor: Floor) -> None:
    floor.seclusion.put([job("lone", alone=True)])
    floor.now = 19.9
    floor.seclusion.look(2)
    assert not floor.cleared
    for floor.now in (20.0, 21.0):
        floor.seclusion.look(2)
    assert floor.cleared == 1 and not floor.begun
    floor.seclusion.look(1)
    assert floor.begun == ["lone"]


def test_one_that_is_taken_away_is_not_begun(floor: Floor) -> None:
    floor.seclusion.put([job("lone", alone=True)])
    assert floor.seclusion.take().execution.id == "lone"  # type: ignore[union-attr]
    assert floor.seclusion.take() is None
    floor.seclusion.look(1)
    assert not floor.begun


def test_one_that_has_another_owner_is_not_begun(floor: Floor) -> None:
    floor.seclusion.put([job("lone", alone=True)])
    floor.seclusion.forget("another")
    floor.seclusion.forget("lone")
    floor.seclusion.look(1)
    assert not floor.begun
