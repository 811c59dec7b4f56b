"""`slotline up` as it is typed: real processes, the scripted model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import slotline
from slotline import Client
from slotline.home import STATE_FILE
from slotline.up.leftovers import find_marked
from slotline.up.server import find_server
from tests.processes import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(slotline.__file__).parent.parent
READY = "Slotline is ready at "


class Running:
    """One `slotline up` and the lines it has printed."""

    def __init__(self, directory: Path, *args: str, **env: str) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._over = False
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SLOTLINE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slotline", "up", "--data-dir", str(directory), *args],
            cwd=ROOT,
            env=variables | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, after: int = 0) -> str:
        """The first line with a text, those before line `after` left out."""

        def found() -> str | None:
            return next((line for line in self.lines[after:] if text in line), None)

        with self._news:
            line = self._news.wait_for(lambda: found() or self._over, timeout=90)
            assert isinstance(line, str), f"{text!r} never came:\n{self.output}"
            return line

    def ready(self) -> Client:
        return Client(re.search(r"http://\S+\d", self.wait_for(READY))[0])

    def pid(self, side: str) -> int:
        """The process that runs a side now; one that was started again is in the state a moment later."""
        return self.state()["processes"][side]["pid"]

    def state(self) -> dict:
        return json.loads((self.directory / STATE_FILE).read_text())

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        status = self.process.wait(timeout=90)
        self._thread.join(timeout=60)
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in find_marked(self.directory):
            process.kill()
        if (server := find_server(self.directory / "valkey")) is not None:
            server.process.kill()
        self._thread.join(timeout=60)
        self.process.stdout.close()


@pytest.fixture
def up(own_home: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*args: str, directory: Path = own_home, **env: str) -> Running:
        started.append(Running(directory, *args, **env))
        return started[-1]

    yield start
    for running in started:
        running.close()


ECHO = ("--model", "fake:echo", "--port", "0")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that is left running by every test that has it."""
    running = Running(tmp_path_factory.mktemp("up") / "data", *ECHO)
    try:
        yield running
        assert running.stop() == 0
    finally:
        running.close()


def pasted(running: Running) -> subprocess.CompletedProcess[str]:
    """Run the commands that were printed, as a shell would."""
    end = running.lines.index(running.wait_for("Ctrl-C stops everything"))
    lines = [line for line in running.lines[:end] if line.startswith("  ")]
    env = os.environ | {"SLOTLINE_DATA_DIR": str(running.directory)}
    script = "set -eu\n" + "\n".join(lines)
    return subprocess.run(
        ["bash", "-c", script], cwd=running.directory, env=env, capture_output=True, text=True, check=False
    )


def nothing_is_left(directory: Path) -> bool:
    return not find_marked(directory) and find_server(directory / "valkey") is None


def test_the_whole_life_of_it(up, own_home: Path) -> None:
    running = up(*ECHO, "--slots", "2")
    with running.ready() as api:
        assert api.generate("hello there", temperature=0).text == "hello there"
        assert api.stats()["workers"][0]["n_parallel"] == 2
        done = api.submit("keep me", temperature=0)
        assert done.result(60).text == "keep me"
    assert "worker | " in running.wait_for("serving fake-echo")
    with Client() as found:  # by the state file
        assert found.base_url == running.state()["url"]
        assert [str(token) for token in found.stream("abc", temperature=0)] == ["a", "b", "c"]
    assert oct(own_home.stat().st_mode & 0o777) == "0o700"

    second = up(*ECHO)
    assert second.ended() == 1
    assert f"already running at {running.state()['url']}: process {running.process.pid} holds" in second.output

    assert running.stop() == 0
    stopped = ("the web API", "the batches", "the worker", "Valkey")
    order = [running.output.index(f"\nstopping {what}") for what in stopped]
    assert order == sorted(order)
    assert nothing_is_left(own_home)
    assert not (own_home / STATE_FILE).exists()
    assert "Traceback" not in running.output

    again = up(*ECHO)
    with again.ready() as api:
        assert api.job(done.id).info()["text"] == "keep me"
    assert again.stop(signal.SIGTERM) == 0

    upload = own_home / "files" / "files" / "old"
    upload.parent.mkdir(parents=True, exist_ok=True)
    upload.touch()
    fresh = up(*ECHO, "--fresh")
    with fresh.ready() as api:
        assert api.jobs()["data"] == []
    assert not upload.exists()
    assert fresh.stop() == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands use curl")
def test_the_printed_commands_can_be_pasted(shared: Running) -> None:
    ran = pasted(shared)
    assert ran.returncode == 0
    assert all(line.startswith("slotline: ") for line in ran.stderr.splitlines())
    rows = (shared.directory / "answers.jsonl").read_text().splitlines()
    assert rows and all(json.loads(row)["error"] is None for row in rows)
    assert '"object":"job"' in ran.stdout.replace(": ", ":")
    assert "event: token\nid: 0\n" in ran.stdout
    assert "event: done\nid: end\n" in ran.stdout


def test_one_that_was_killed_is_cleared_up_after_and_its_jobs_go_on(up, own_home: Path) -> None:
    killed = up("--model", "fake:count:0.05", "--port", "0", "--slots", "1", SLOTLINE_NAME="counter")
    with killed.ready() as api:
        running = api.submit("x", max_tokens=100, temperature=0)
        waiting = api.submit("y", max_tokens=3, temperature=0)
        next(iter(running.stream(60)))
    before = killed.state()
    killed.process.kill()
    killed.process.wait()
    left = {process.pid for process in find_marked(own_home)}
    assert {before["processes"][side]["pid"] for side in ("web", "batches", "worker")} <= left

    running_again = up("--model", "fake:count", "--port", "0", "--slots", "1", SLOTLINE_NAME="counter")
    running_again.wait_for("that an earlier `slotline up` left behind")
    running_again.wait_for("taking over the Valkey that was left running")
    with running_again.ready() as api:
        assert api.job(running.id).result(60).text.startswith("1 2 3 4 ")
        assert api.job(waiting.id).result(60).text == "1 2"
    assert not left & {process.pid for process in find_marked(own_home)}
    assert running_again.pid("redis") == before["processes"]["redis"]["pid"]
    assert running_again.stop() == 0
    assert nothing_is_left(own_home)


def test_a_second_signal_hands_running_jobs_back_at_once(up, own_home: Path) -> None:
    # Without the second signal the job would run on for longer than anybody here waits.
    running = up("--model", "fake:count:0.05", "--port", "0", SLOTLINE_DRAIN_S="600")
    with running.ready() as api:
        job = api.submit("x", max_tokens=4000, temperature=0)
        next(iter(job.stream(60)))
    running.process.send_signal(signal.SIGINT)
    running.wait_for("stopping the worker")
    assert running.stop() == 0
    assert nothing_is_left(own_home)

    again = up(*ECHO)
    with again.ready() as api:
        assert api.job(job.id).status() in ("queued", "running")
        api.job(job.id).cancel()
    assert again.stop() == 0


@pytest.mark.parametrize(
    ("side", "word"), [("web", "listening on"), ("batches", "runs batches"), ("worker", "serving fake-echo")]
)
def test_a_side_that_dies_is_started_again(shared: Running, side: str, word: str) -> None:
    with shared.ready() as api:
        seen = len(shared.lines)
        psutil.Process(shared.pid(side)).kill()
        shared.wait_for(f"{side} ended with status -9; it starts again in 1 s", seen)
        shared.wait_for(word, seen)
        assert api.generate("still here", temperature=0, timeout=60).text == "still here"


def test_a_valkey_that_dies_is_started_again_with_its_data(shared: Running) -> None:
    with shared.ready() as api:
        done = api.submit("a", temperature=0)
        done.result(60)
        seen = len(shared.lines)
        psutil.Process(shared.pid("redis")).kill()
        shared.wait_for("starting Valkey", seen)
        assert api.generate("b", temperature=0, timeout=60).text == "b"
        assert done.status() == "completed"


def test_a_model_that_is_none_ends_everything_with_its_message(up, own_home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and then nothing that makes sense")
    running = up("--model", str(broken), "--port", "0")
    assert running.ended() == 2
    assert running.lines[-1] != ""
    assert f"worker cannot run: slotline worker: llama.cpp cannot load {broken}" in running.output
    assert nothing_is_left(own_home)
    assert not (own_home / STATE_FILE).exists()


def test_a_model_that_cannot_be_one_is_one_line_before_anything_is_started(up, own_home: Path) -> None:
    running = up("--model", "/no/such/model.gguf", "--port", "0")
    assert running.ended() == 2
    (line,) = running.lines
    assert "/no/such/model.gguf" in line and "--model" in line
    assert not (own_home / STATE_FILE).exists()


def test_a_port_that_is_taken_is_one_line_before_anything_is_started(up, own_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        running = up("--model", "fake:echo", "--port", str(taken.getsockname()[1]))
        assert running.ended() == 2
    assert len(running.lines) == 1
    assert re.fullmatch(r"slotline: port \d+ of 127\.0\.0\.1 is taken: .* choose another with --port", running.output)
    assert not (own_home / "valkey").exists()


def test_a_redis_that_is_given_is_used_and_left_running(up, own_home: Path, valkey: str, client) -> None:
    running = up(*ECHO, "--redis-url", valkey)
    with running.ready() as api:
        job = api.submit("a", temperature=0)
        job.result(60)
    assert running.state()["redis_url"] == valkey
    assert "redis" not in running.state()["processes"]
    assert running.stop() == 0
    assert client.exists(f"rq:job:{job.id}")
    assert not (own_home / "valkey").exists()


def test_a_redis_that_is_not_there_is_one_line(up, own_home: Path) -> None:
    running = up(*ECHO, "--redis-url", "redis://127.0.0.1:9/0", SLOTLINE_REDIS_WAIT_S="0")
    assert running.ended() == 69
    assert len(running.lines) == 1
    assert running.output.startswith("slotline: no answer from Redis at 127.0.0.1:9")


def test_another_side_can_be_added_without_naming_the_redis(shared: Running) -> None:
    env = os.environ | {"SLOTLINE_DATA_DIR": str(shared.directory)}

    def command(*args: str) -> list[str]:
        return [sys.executable, "-m", "slotline", *args]

    with shared.ready() as api:
        extra = subprocess.Popen(
            command("worker", "--model", "fake:echo", "--n-parallel", "1"),
            cwd=ROOT,
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert extra.stderr.readline() == "slotline: using the Redis of the running `slotline up`\n"
            assert "serving fake-echo" in extra.stderr.readline()
            eventually(lambda: 1 in [worker["n_parallel"] for worker in api.stats()["workers"]], "it shows itself")
            for check in (["worker", "--model", "fake:echo", "--check"], ["batches", "--check"]):
                assert subprocess.run(command(*check), cwd=ROOT, env=env, check=False).returncode == 0
        finally:
            extra.terminate()
            extra.communicate(timeout=60)
        assert extra.returncode == 0
