"""Tells readers of jobs that wait how many are ahead, every few seconds.

What is told goes out on the channel of the job, so that all its readers hear it, over HTTP or from Redis.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from redis.exceptions import RedisError

from shared.ahead import EVERY_S
from shared.jobs import JobStore
from shared.records import JobRecord
from shared.registry import Registry
from webapi.ticker import Ticker

log = logging.getLogger(__name__)

#: Figures of the workers that are no older than this will do.
FIGURES_S = 1.0


class Waiting:
    """The jobs of this web process's readers. They stay while they have one: a job may come to wait again."""

    def __init__(self, store: JobStore, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()
        self._models: dict[str, str] = {}
        self._ticker = Ticker("waiting", EVERY_S, self._tick)

    def enter(self, job: JobRecord) -> None:
        """Tell a reader, whose subscription is there, of this job now and every `EVERY_S`, until `leave`."""
        if job.is_over:
            return
        with self._lock:
            self._readers[job.id] += 1
            self._models[job.id] = job.model
        self._ticker.enter()
        if job.rq_status == "queued":
            self._tell({job.id: job.model})

    def leave(self, job: JobRecord) -> None:
        """A reader that has entered with this very record has gone."""
        if job.is_over:
            return
        self._ticker.leave()
        with self._lock:
            self._readers[job.id] -= 1
            if not self._readers[job.id]:
                del self._readers[job.id], self._models[job.id]

    def close(self) -> None:
        """End the thread."""
        self._ticker.close()

    def _tick(self) -> None:
        with self._lock:
            models = dict(self._models)
        if models:
            self._tell(models)

    def _tell(self, models: Mapping[str, str]) -> None:
        try:
            known = self._registry.recent(FIGURES_S) or self._registry.known()
            self._store.ahead.tell(models, known)
        except RedisError as error:
            log.debug("nobody is told of %d jobs' places: %s", len(models), error)
