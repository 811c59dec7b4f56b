"""A worker on a real server whose threads do not run: the test pulls, prepares, ticks and beats by hand."""

from __future__ import annotations

import os
import threading
from typing import Any

import redis

from shared.jobs import JobStore
from shared.schemas import JobRequest
from shared.settings import WorkerSettings, load
from worker.batching import load_strategy
from worker.engine import Engine
from worker.fake_backend import FakeBackend
from worker.intake import Intake
from worker.preparing import Preparer
from worker.requests import Ended, Event
from worker.slot_worker import SlotWorker


class Beating:
    """The worker, its engine, and what the engine said."""

    def __init__(self, client: redis.Redis, url: str, worker: str = "w", **flags: Any) -> None:
        settings = load(WorkerSettings, {"model_path": "fake:count", "redis_url": url, **flags})
        backend = FakeBackend.from_settings(settings)
        self.events: list[Event] = []
        self.client = client
        self.store = JobStore(client, settings)
        self.worker = SlotWorker(
            worker, settings, client, Intake(settings, backend.info, backend.vocab), 8192, os.getppid()
        )
        self.engine = Engine(backend, load_strategy("decode_maximal"), self._emit)
        self.worker.connect(self.engine)
        self.worker.register_birth()
        intake, say, abandon = self.worker.intake, self.events.extend, threading.Event()
        self.preparer = self.worker._preparer = Preparer(intake, self.store, self.engine, say, abandon)

    def _emit(self, events: list[Event]) -> None:
        self.events += events
        self.worker.emit(events)

    def submit(self, *, bound: str | None = None, **body: Any) -> str:
        request = JobRequest(**{"prompt": "x", "max_tokens": 500, **body})
        return self.store.submit(request, "fake-count", bound=bound).job_id

    def pull(self) -> None:
        """Pull what there is room for and turn it into requests, as main and intake thread would."""
        self.worker._next_look = 0.0
        self.worker._work_once()
        self.prepare()

    def prepare(self) -> None:
        """Turn what was pulled into requests."""
        self.preparer.put(None)  # type: ignore[arg-type]
        self.preparer._run()

    def ended(self) -> dict[str, str | None]:
        return {e.request.id: e.finish_reason for e in self.events if isinstance(e, Ended)}
