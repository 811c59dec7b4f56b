from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from tests.processes import eventually
from webapi import ticker
from webapi.ticker import Ticker


class Work:
    def __init__(self) -> None:
        self.times = 0
        self.fails = False

    def __call__(self) -> None:
        self.times += 1
        if self.fails:
            self.fails = False
            raise RuntimeError("a defect")


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def found(work: Work) -> Iterator[Ticker]:
    found = Ticker("test-ticker", 0.005, work)
    yield found
    found.close()


def threads() -> int:
    return sum(thread.name == "test-ticker" for thread in threading.enumerate())


def test_nothing_runs_before_there_is_a_user(found: Ticker, work: Work) -> None:
    assert threads() == 0
    assert work.times == 0


def test_work_is_done_again_and_again_on_one_thread(found: Ticker, work: Work) -> None:
    for _ in range(10):
        found.enter()
    eventually(lambda: work.times >= 3, "three times")
    assert threads() == 1


def test_the_thread_ends_after_the_last_user_and_starts_again(
    found: Ticker, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticker, "LINGER_S", 0.02)
    found.enter()
    found.enter()
    found.leave()
    before = work.times
    eventually(lambda: work.times > before + 10, "it goes on for the user that is left")
    found.leave()
    eventually(lambda: threads() == 0, "the thread ends")
    before = work.times
    found.enter()
    assert eventually(lambda: work.times > before, "it works again")


def test_a_defect_is_logged_and_does_not_end_it(found: Ticker, work: Work, caplog: pytest.LogCaptureFixture) -> None:
    work.fails = True
    with caplog.at_level(logging.ERROR):
        found.enter()
        eventually(lambda: work.times >= 3, "three times")
    assert "test-ticker" in caplog.text


def test_closing_ends_the_thread_whoever_uses_it(found: Ticker) -> None:
    found.enter()
    found.close()
    assert threads() == 0
    found.enter()
    assert threads() == 0
