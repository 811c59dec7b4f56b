from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from slotline.up import processes
from slotline.up.leftovers import MARK, find_marked, mark
from slotline.up.processes import Child
from slotline.up.stopping import Stopper
from tests.processes import eventually

WEB = """
import os, signal, subprocess, sys, time
print("line 1", flush=True)
print("err\\xff", file=sys.stderr, flush=True)
asked = 0
def stop(*_):
    global asked
    asked += 1
    print("asked", asked, flush=True)
    if asked >= int(os.environ["SIGNALS"]):
        sys.exit(int(os.environ.get("STATUS", 0)))
signal.signal(signal.SIGTERM, stop)
if os.environ.get("EXIT"):
    sys.exit(int(os.environ["EXIT"]))
if os.environ.get("OFFSPRING"):
    subprocess.Popen(["sleep", "60"], start_new_session=True)
print("ready", flush=True)
while True:
    time.sleep(60)
"""


class World:
    """A package `slotline` whose `slotline web` does what a test wants, and what came of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        package = path / "slotline"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(WEB)
        self.lines: SimpleQueue[str] = SimpleQueue()
        self.events: SimpleQueue[object] = SimpleQueue()
        self.children: list[Child] = []

    def start(self, side: str = "web", **env: str) -> Child:
        variables = {"PYTHONPATH": str(self.path), "SIGNALS": "1", MARK: mark(side, self.path)} | env
        child = Child(side, variables, lambda name, line: self.lines.put(f"{name}: {line}"), self.events.put)
        self.children.append(child)
        child.start()
        return child

    def line(self) -> str:
        return self.lines.get(timeout=60)

    def take(self, wait_s: float) -> object:
        try:
            return self.events.get(timeout=wait_s)
        except Empty:
            return None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for child in world.children:
        child.end_group(signal.SIGKILL)
    for process in find_marked(tmp_path):
        process.kill()


def ready(world: World) -> None:
    while not world.line().endswith(": ready"):
        pass


def wait_for_offspring(world: World) -> None:
    """A process that has just been started shows its environment a moment later."""
    eventually(lambda: len(find_marked(world.path)) == 2, "the child has started another")


def test_its_lines_are_passed_on_and_its_end_is_told(world: World) -> None:
    child = world.start(EXIT="3")
    assert sorted([world.line(), world.line()]) == ["web: err\xff", "web: line 1"]
    assert world.take(20) is child
    assert (child.status, child.is_running) == (3, False)
    assert child.last_line in ("line 1", "err\xff")


def test_it_has_a_session_of_its_own(world: World) -> None:
    child = world.start()
    assert os.getsid(child.pid) == child.pid
    assert child.is_running


def test_it_is_started_so_that_the_current_directory_shadows_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "elsewhere"
    (shadow / "slotline").mkdir(parents=True)
    (shadow / "slotline" / "__main__.py").write_text("print('the wrong one', flush=True)")
    monkeypatch.chdir(shadow)
    world.start(EXIT="0")
    assert "wrong" not in world.line()


def test_a_child_that_dies_young_waits_longer_each_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    child = world.start(EXIT="1")
    assert [child.backoff_s() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    monkeypatch.setattr(processes, "SETTLED_S", -1.0)
    assert child.backoff_s() == 1


def test_one_that_was_never_started_can_be_stopped(world: World) -> None:
    child = Child("web", {}, print, world.events.put)
    child.terminate()
    child.end_group(signal.SIGKILL)
    assert (child.pid, child.status, child.is_running) == (None, None, False)


def stopper(world: World, take: Callable[[float], object] | None = None) -> tuple[Stopper, list[str]]:
    said: list[str] = []
    return Stopper(world.path, take or world.take, said.append), said


def test_it_is_asked_once_and_given_its_time(world: World) -> None:
    child = world.start()
    ready(world)
    stop, said = stopper(world)
    stop.stop(child, 20)
    assert (child.status, said, world.line()) == (0, [], "web: asked 1")


def test_a_second_signal_asks_it_again_and_so_the_next_child(world: World) -> None:
    child, other = world.start(SIGNALS="2"), world.start("worker", SIGNALS="2")
    ready(world)
    ready(world)
    stop, said = stopper(world)
    world.events.put(signal.SIGINT)
    stop.stop(child, 20)
    stop.stop(other, 20)
    assert (child.status, other.status, said) == (0, 0, [])


def test_one_that_does_not_stop_in_time_is_ended_with_all_it_has_started(world: World) -> None:
    child = world.start(SIGNALS="99", OFFSPRING="1")
    ready(world)
    wait_for_offspring(world)
    stop, said = stopper(world)
    stop.stop(child, 0.2)
    assert child.status == -signal.SIGKILL
    assert said == ["web did not stop in time and is ended"]
    assert find_marked(world.path) == []


def test_what_a_stopped_child_leaves_behind_is_ended(world: World) -> None:
    child = world.start(OFFSPRING="1")
    ready(world)
    wait_for_offspring(world)
    stop, _ = stopper(world)
    stop.stop(child, 20)
    assert find_marked(world.path) == []
