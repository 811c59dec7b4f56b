"""A batch with all that runs it but the model, whose part the test plays: jobs end when the test says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from rq.job import JobStatus

from shared.batches.records import BatchRecord
from shared.batches.runner import Lease, Runner, Tools
from shared.batches.store import BatchStore
from shared.errors import StorageUnavailable
from shared.files import FileStore
from shared.jobs import JobStore, request_of
from shared.names import JOBS_INDEX
from shared.records import job_object
from shared.registry import ModelCard, Registry
from shared.settings import BatchSettings, load
from shared.storage import Storage, storage_of
from shared.work import End, Pulled
from tests.shared.world import MODEL, QUEUES, World

CHAT = "/v1/chat/completions"


class Clock:
    """A clock that stands still until told otherwise."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Unreliable:
    """A storage that can be told to refuse."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        if self.refuses:
            raise StorageUnavailable("the disk is full")
        return getattr(self._storage, name)


def line(number: int | str, **body: Any) -> dict[str, Any]:
    """A request whose answer is `text N`."""
    given = {"model": MODEL, "messages": [{"role": "user", "content": f"text {number}"}]} | body
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": given}


class Model:
    """Ends jobs as a worker does; the answer to a chat is its last message."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.served: list[str] = []

    def serve(self, count: int = 1000, status: Any = "completed", error: dict[str, Any] | None = None) -> int:
        """Run up to `count` of the jobs that wait; how many there were."""
        pulled = self.pull(count)
        for one in pulled:
            self.end(one, status, error)
        return len(pulled)

    def pull(self, count: int) -> list[Pulled]:
        return self.world.store.pull("w1", QUEUES, count)

    def end(self, pulled: Pulled, status: Any = "completed", error: dict[str, Any] | None = None) -> str:
        self.served.append(pulled.record.id)
        final = job_object(
            pulled.record,
            status=status,
            ended_at=1.0,
            text=self._text(pulled),
            finish_reason="stop",
            usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 1},
            error=error,
        )
        (outcome,) = self.world.store.commit([End(pulled.record.id, pulled.execution, final, 0, 100)])
        if outcome == "ok":
            done = {"completed": JobStatus.FINISHED, "failed": JobStatus.FAILED, "cancelled": JobStatus.CANCELED}
            self.world.record(pulled, done[status])
        return str(outcome)

    def _text(self, pulled: Pulled) -> str:
        request = request_of(pulled.record)
        return str(request["messages"][-1]["content"] if "messages" in request else request["prompt"])


class Batches:
    """Batches on a storage in a folder, and runners for them."""

    def __init__(
        self, client: redis.Redis, url: str, folder: Path, now: Callable[[], float] | None = None, **settings: Any
    ) -> None:
        self.client: Any = client
        given = {"redis_url": url, "files_url": str(folder), **settings}
        self.settings = load(BatchSettings, given)
        self.storage = Unreliable(storage_of(self.settings, fsync=lambda handle: None))
        self._runners: list[Runner] = []
        self.now: Any = now or Clock()
        self.clock = Clock(0.0)
        self.store = BatchStore(client, self.settings, self.now)
        self.files = FileStore(client, self.storage, self.settings, self.now)  # type: ignore[arg-type]
        jobs = JobStore(client, self.settings)
        self.world = World(jobs, client)
        self.model = Model(self.world)
        self.registry = Registry(client)
        self.registry.register_model(ModelCard(MODEL, "alias", 4096, 100, 4096, True, 0, "a model of the tests"))
        self.tools = Tools(self.store, self.files, jobs, self.registry, self.settings)

    def submit(self, lines: Sequence[dict[str, Any]] | bytes, endpoint: Any = CHAT, window: str = "24h") -> str:
        """Upload an input and make a batch of it; its id."""
        data = lines if isinstance(lines, bytes) else b"\n".join(json.dumps(one).encode() for one in lines)
        with self.files.upload() as upload:
            upload.write(data)
        file = self.files.register(upload, "input.jsonl")
        return self.store.create(file.id, endpoint, window).id

    def runner(self, batch_id: str) -> Runner:
        """Take the batch, as one whose last holder is dead."""
        self.client.delete(f"slotline:batch:{batch_id}:lease")
        fence = self.store.acquire(batch_id, "me", 60)
        assert fence is not None
        self._runners.append(Runner(self.tools, Lease(batch_id, fence), self.clock))
        return self._runners[-1]

    def close(self) -> None:
        for runner in self._runners:
            runner.close()

    def get(self, batch_id: str) -> BatchRecord:
        return self.store.get(batch_id)

    def rows(self, batch_id: str, which: str = "output") -> list[dict[str, Any]]:
        """The rows of a result file so far."""
        file_id = getattr(self.get(batch_id), f"{which}_file_id")
        if file_id is None:
            return []
        _, chunks = self.files.content(file_id)
        return [json.loads(row) for row in b"".join(chunks).splitlines()]

    def texts(self, batch_id: str) -> dict[str, str]:
        """The answers, by custom_id; fails where one comes twice."""
        rows = self.rows(batch_id)
        found = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
        assert len(found) == len(rows), "a line has two rows"
        return found

    def manifest(self, batch_id: str) -> dict[str, Any]:
        with self.storage.open(f"batches/{batch_id}/manifest.json") as stream:
            found: dict[str, Any] = json.loads(stream.read())
        return found

    def counts(self, batch_id: str) -> tuple[int, int, int]:
        """Completed, failed, total."""
        batch = self.get(batch_id)
        return batch.completed, batch.failed, batch.total

    def left_in_redis(self, batch_id: str) -> set[str]:
        """What there is of the batch's jobs."""
        names = {key.decode() for key in self.client.keys("*") if key.startswith((b"rq:", b"slotline:feed"))}
        ids = {job_id.decode() for job_id in self.client.zrange(JOBS_INDEX, 0, -1)}
        return {name for name in names | ids if batch_id in name}


def until_done(runner: Runner, between: Callable[[], object] = lambda: None, limit: int = 1000) -> None:
    """Step until nothing is left to do, with something in between."""
    for _ in range(limit):
        if runner.step():
            return
        between()
    raise AssertionError("the runner never came to an end")
