"""What a parent reads of what its model process wrote, whatever became of that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.engine_harness import Harness
from worker.black_box import ADMISSION, INTAKE, MOST_SLOTS, BlackBox
from worker.fake_backend import FakeBackend


def test_an_empty_box_says_nothing() -> None:
    box = BlackBox()
    assert (box.name, box.ticks, box.executions) == ("", 0, [])


def test_each_place_holds_what_was_entered_last() -> None:
    box = BlackBox()
    box.enter(0, "a-long-name-for-an-execution")
    box.enter(MOST_SLOTS - 1, "last")
    box.enter(0, "b")
    assert box.executions == ["b", "last"]
    box.leave(0)
    assert box.executions == ["last"]


def test_a_job_in_two_places_is_named_once() -> None:
    box = BlackBox()
    box.enter(3, "a")
    with box.working_on(ADMISSION, "a"), box.working_on(INTAKE, "b"):
        assert box.executions == ["a", "b"]
    assert box.executions == ["a"]


def test_a_place_is_left_whatever_goes_wrong() -> None:
    box = BlackBox()
    with pytest.raises(ValueError, match="no"), box.working_on(INTAKE, "a"):
        raise ValueError("no")
    assert box.executions == []


def test_a_name_of_the_greatest_length_fits() -> None:
    box = BlackBox()
    name = "m" * 128 + "-" + "h" * 253 + "-4194304-abcdef"
    box.sign(name)
    assert box.name == name and box.executions == []


def test_ticks_are_counted_until_the_engine_rests() -> None:
    box = BlackBox()
    for _ in range(300):
        box.tick()
    assert box.ticks == 300
    box.rest()
    assert box.ticks == 0


def test_what_was_written_outlives_the_writer_and_is_cleared_for_the_next() -> None:
    box = BlackBox.to_share()
    assert box.file is not None
    write = (
        "import os, signal, sys; from worker.black_box import BlackBox; box = BlackBox(int(sys.argv[1]));"
        "box.sign('w'); box.tick(); box.enter(2, 'e'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    writer = subprocess.run([sys.executable, "-c", write, str(box.file)], pass_fds=[box.file], cwd=Path.cwd())
    assert writer.returncode == -signal.SIGKILL
    assert (box.name, box.ticks, box.executions) == ("w", 1, ["e"])
    box.clear()
    assert (box.name, box.ticks, box.executions) == ("", 0, [])
    os.close(box.file)


def test_an_engine_notes_what_is_in_its_slots() -> None:
    harness = Harness(FakeBackend("count", n_parallel=2))
    for name in "abc":
        harness.submit(name, max_tokens=3 if name == "a" else 50)
    box = harness.engine.box
    harness.tick()
    assert box.executions == ["execution-a", "execution-b"] and box.ticks == 1
    harness.tick(4)
    assert box.executions == ["execution-b", "execution-c"]
    harness.engine.hand_back(running=True)
    harness.tick()
    assert box.executions == []
