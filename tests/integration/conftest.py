"""Workers as real processes against the test run's Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from rq import Queue

from shared.connection import connect
from shared.jobs import JobStore
from shared.names import SERIALIZER, queue_name
from shared.schemas import JobRequest
from shared.settings import Settings, load
from tests.processes import Service, WebProcess, WorkerProcess, eventually, new_valkey, stop_all

StartWorker = Callable[..., WorkerProcess]
StartWeb = Callable[..., WebProcess]
StartService = Callable[..., Service]

P = TypeVar("P", bound=Service)


@pytest.fixture
def start_worker(client: redis.Redis, valkey: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Start workers that are stopped after the test."""
    started: list[WorkerProcess] = []

    def start(**settings: Any) -> WorkerProcess:
        started.append(WorkerProcess(client, valkey, tmp_path, **settings))
        return started[-1]

    yield start
    stop_all(started)


@pytest.fixture
def start_web(client: redis.Redis, valkey: str, tmp_path: Path) -> Iterator[StartWeb]:
    """Start web sides that are stopped after the test; they share a folder of files with `start_service`."""
    started: list[WebProcess] = []

    def start(**settings: Any) -> WebProcess:
        started.append(WebProcess(valkey, tmp_path, **{"files_url": str(tmp_path / "files"), **settings}))
        return started[-1]

    yield start
    stop_all(started)


@pytest.fixture
def start_service(client: redis.Redis, valkey: str, tmp_path: Path) -> Iterator[StartService]:
    """Start other services by name, such as `batches`, that are stopped after the test."""
    started: list[Service] = []

    def start(command: str, **settings: Any) -> Service:
        started.append(Service(command, valkey, tmp_path, **{"files_url": str(tmp_path / "files"), **settings}))
        return started[-1]

    yield start
    stop_all(started)


class Stack:
    """Processes over a Valkey of their own, for tests of a module that leave each other's jobs alone.

    Attributes:
        url: where the Valkey is.
    """

    def __init__(self, url: str, folder: Path) -> None:
        settings = load(Settings, {"redis_url": url})
        self.url = url
        self.client = connect(settings)
        self.store = JobStore(self.client, settings)
        self._folder = folder
        self._started: list[Service] = []

    def worker(self, **settings: Any) -> WorkerProcess:
        return self._keep(WorkerProcess(self.client, self.url, self._folder, **settings))

    def web(self, **settings: Any) -> WebProcess:
        return self._keep(WebProcess(self.url, self._folder, files_url=str(self._folder / "files"), **settings))

    def service(self, command: str, **settings: Any) -> Service:
        files = str(self._folder / "files")
        return self._keep(Service(command, self.url, self._folder, files_url=files, **settings))

    def _keep(self, process: P) -> P:
        self._started.append(process)
        return process

    def stop(self) -> None:
        stop_all(self._started)
        self.client.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Processes that are started once for a module."""
    with new_valkey() as server:
        found = Stack(server.connection_url, tmp_path_factory.mktemp("stack"))
        yield found
        found.stop()


@pytest.fixture
def queue(client: redis.Redis) -> Queue:
    """The queue an RQ user would enqueue on."""
    return Queue(queue_name("fake-echo", "normal"), connection=client, serializer=SERIALIZER)


class Jobs:
    """Submits to the scripted model and waits for what becomes of it."""

    def __init__(self, store: JobStore, model: str) -> None:
        self.store = store
        self.model = model

    def submit(self, prompt: str = "hello", **fields: Any) -> str:
        return self.store.submit(JobRequest(prompt=prompt, **{"temperature": 0, **fields}), self.model).job_id

    def status(self, job_id: str) -> str:
        return str(self.store.view(job_id)["status"])

    def until(self, job_id: str, *statuses: str) -> dict[str, Any]:
        eventually(lambda: self.status(job_id) in statuses, f"job {job_id} becomes {statuses}")
        return self.store.view(job_id)

    def until_recorded(self, job_id: str, *rq_statuses: str) -> None:
        """Wait for RQ's own record, which follows the commit."""
        eventually(lambda: self.store.fetch(job_id).rq_status in rq_statuses, f"RQ calls {job_id} {rq_statuses}")

    def until_tokens(self, job_id: str, count: int = 1) -> None:
        eventually(lambda: len(self.store.stream.tokens(job_id)) >= count, f"job {job_id} has {count} tokens")


@pytest.fixture
def jobs(store: JobStore) -> Jobs:
    return Jobs(store, "fake-echo")
