from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slotline.up.leftovers import MARK, end, find_leftovers, find_marked, find_named, mark
from slotline.up.state import identity, write_state

#: Says when it is ready and ends with the number of the signals it got; "stubborn" ends only when it must.
SLEEPER = """
import signal, sys, time
got = []
def note(*_):
    got.append(1)
    if len(got) == int(sys.argv[1]):
        sys.exit(0)
signal.signal(signal.SIGTERM, note)
print("ready", flush=True)
while True:
    time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator:
    started: list[subprocess.Popen[str]] = []

    def start(signals: int, marked: str | None = None) -> subprocess.Popen[str]:
        env = os.environ | ({MARK: marked} if marked else {})
        process = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, str(signals)], env=env, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_is_found_by_its_id_and_start(start) -> None:
    process = start(1)
    named = identity(process.pid)
    assert find_named(named).pid == process.pid
    assert find_named(named | {"started": named["started"] - 60}) is None
    process.kill()
    process.wait()
    assert find_named(named) is None


@pytest.mark.parametrize("named", [None, {}, [], "x", {"pid": "x", "started": 1}, {"pid": 1}])
def test_nonsense_names_no_process(named: object) -> None:
    assert find_named(named) is None


def test_marked_processes_are_found_of_this_directory_and_side_only(start, tmp_path: Path) -> None:
    web = start(1, mark("web", tmp_path))
    worker = start(1, mark("worker", tmp_path))
    start(1, mark("web", tmp_path / "other"))
    assert {p.pid for p in find_marked(tmp_path)} == {web.pid, worker.pid}
    assert [p.pid for p in find_marked(tmp_path, ["worker"])] == [worker.pid]


def test_leftovers_are_those_of_the_state_and_those_that_are_marked_each_once(start, tmp_path: Path) -> None:
    web, worker, model, redis = (
        start(1),
        start(1, mark("worker", tmp_path)),
        start(1, mark("worker", tmp_path)),
        start(1),
    )
    processes = {"web": identity(web.pid), "worker": identity(worker.pid), "redis": identity(redis.pid)}
    write_state(tmp_path, {"processes": processes})
    found = [p.pid for p in find_leftovers(tmp_path)]
    assert sorted(found) == sorted([web.pid, worker.pid, model.pid])


def test_a_process_id_that_now_belongs_to_another_is_left_alone(start, tmp_path: Path) -> None:
    stranger = start(1)
    started_before = identity(stranger.pid) | {"started": 1_000_000_000.0}
    write_state(tmp_path, {"processes": {"web": started_before}})
    assert find_leftovers(tmp_path) == []


def test_no_state_means_no_leftovers(tmp_path: Path) -> None:
    assert find_leftovers(tmp_path) == []


@pytest.mark.parametrize(("signals", "status"), [(1, 0), (2, 0), (99, -signal.SIGKILL)])
def test_processes_are_asked_twice_and_then_made_to_end(start, signals: int, status: int) -> None:
    process = psutil.Process(start(signals).pid)
    end([process], wait_s=4.0 if signals < 99 else 0.4)
    assert process.wait(timeout=30) == status


def test_a_process_that_has_gone_by_itself_is_no_error(start) -> None:
    process = start(1)
    found = psutil.Process(process.pid)
    process.kill()
    process.wait()
    end([found])
    assert not found.is_running()
