"""Real processes of ours in tests: started, waited for by what they say in Redis, and always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import redis

from shared.registry import Registry, WorkerStats

T = TypeVar("T")


def eventually(ask: Callable[[], T], what: str, limit_s: float = 30.0) -> T:
    """Ask again and again until the answer is true, and return it."""
    deadline = time.monotonic() + limit_s
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.01)
    return answer


class WorkerProcess:
    """`slotline worker` as a user starts it."""

    def __init__(self, client: redis.Redis, redis_url: str, folder: Path, model: str = "fake:echo", **settings: Any):
        self._registry = Registry(client)
        self.log_path = folder / f"worker-{time.monotonic_ns()}.log"
        flags = [_flag(name.replace("_", "-"), value) for name, value in settings.items()]
        known = {stats.worker for stats in self._registry.workers()}
        command = [sys.executable, "-P", "-m", "slotline", "worker", f"--model={model}", *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SLOTLINE_REDIS_URL": redis_url},
                cwd=folder,
                start_new_session=True,
            )
        self.name = eventually(lambda: self._new(known), "the worker shows itself", 60).worker

    def _new(self, known: set[str]) -> WorkerStats | None:
        assert self.process.poll() is None, f"the worker ended: {self.log()}"
        return next((s for s in self._registry.workers() if s.worker not in known), None)

    @property
    def stats(self) -> WorkerStats:
        return next(s for s in self._registry.workers() if s.worker == self.name)

    @property
    def model_pid(self) -> int:
        """The process id of the model process, which is part of its name."""
        return int(self.name.rsplit("-", 2)[1])

    def log(self) -> str:
        return self.log_path.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float = 40.0) -> int:
        return self.process.wait(timeout=limit_s)

    def kill(self) -> None:
        """End parent and model process at once, as a power cut would."""
        self.process.kill()
        self.process.wait()
        try:
            os.kill(self.model_pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        eventually(lambda: not _alive(self.model_pid), "the model process is gone")

    def stop(self) -> int:
        """End it well if it still runs."""
        if self.process.poll() is None:
            self.terminate()
            try:
                return self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the worker did not stop: {self.log()}") from None
        return self.process.returncode


class Service:
    """A process of ours other than a worker, such as `slotline web`, as a user starts it."""

    def __init__(self, command: str, redis_url: str, folder: Path, **settings: Any):
        self.log_path = folder / f"{command}-{time.monotonic_ns()}.log"
        flags = [_flag(name.replace("_", "-"), value) for name, value in settings.items()]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slotline", command, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SLOTLINE_REDIS_URL": redis_url},
                cwd=folder,
                start_new_session=True,
            )

    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        """End it with all its children at once, as a power cut would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """End it well if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=40)
        return int(self.process.returncode)


class WebProcess(Service):
    """`slotline web` on a free port; `url` is where it listens."""

    def __init__(self, redis_url: str, folder: Path, **settings: Any):
        super().__init__("web", redis_url, folder, **{"port": 0, **settings})
        self.url = eventually(self._listening, "the web side listens")

    def _listening(self) -> str | None:
        assert self.process.poll() is None, f"the web side ended: {self.log()}"
        lines = [line for line in self.log().splitlines() if "listening on " in line]
        return lines[0].rpartition(" ")[2] if lines else None


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
