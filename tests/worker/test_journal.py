from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shared.stream import Append
from worker import journal
from worker.journal import Journal


def said(execution: str, *at: str) -> list[Append]:
    return [Append("job", execution, place, "token", "{}") for place in at]


def held(execution: str) -> Any:
    return SimpleNamespace(execution=SimpleNamespace(id=execution))


def test_what_was_said_is_kept_in_order_by_execution() -> None:
    kept = Journal()
    kept.note(said("a", "1-0") + said("b", "1-0") + said("a", "2-0"))
    assert [e.at for e in kept.said("a")] == ["1-0", "2-0"]
    kept.forget("a")
    assert kept.said("a") == [] and len(kept.said("b")) == 1


def test_ends_are_kept_for_a_while() -> None:
    now = [0.0]
    kept = Journal(clock=lambda: now[0])
    for execution in ("a", "b"):
        kept.note(said(execution, "1-0"))
        kept.end(held(execution), {}, [])
        now[0] += journal.KEEP_S
    assert [e.held.execution.id for e in kept.endings()] == ["a", "b"]
    kept.note(said("c", "1-0"))
    kept.end(held("c"), {}, [])
    assert [e.held.execution.id for e in kept.endings()] == ["b", "c"]
    assert kept.said("a") == [] and kept.said("b")


def test_of_many_ends_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEEP_EVENTS", 10)
    kept = Journal()
    for execution in "abcde":
        kept.note(said(execution, "1-0", "2-0", "3-0"))
        kept.end(held(execution), {}, [])
    assert [e.held.execution.id for e in kept.endings()] == ["d", "e"]
    assert kept.said("c") == [] and len(kept.said("d")) == 3


def test_an_end_that_is_said_again_stays_as_it_was() -> None:
    kept = Journal()
    kept.end(held("a"), {"ended_at": 1}, [])
    kept.end(held("a"), {"ended_at": 2}, [])
    kept.forget("a")
    found = kept.ending("a")
    assert found is not None and found.final == {"ended_at": 1} and len(kept.endings()) == 1
