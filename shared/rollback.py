"""What becomes of a Redis that comes back without its last seconds, as a promoted replica that lagged.

Each server process has a run id of its own, so a new one shows that something may be missing. Workers remember what
they hold: each registers its jobs again, and nobody takes new ones before all have, since a job that the server has
waiting may be running (`pull.lua`). That takes a beat of each worker, and at most the `grace_s` of whoever comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import redis
from rq.registry import DeferredJobRegistry, ScheduledJobRegistry
from rq.utils import now

from shared.lua import script
from shared.names import (
    JOBS_INDEX,
    KNOWN_RUN,
    RQ_QUEUES,
    SETTLING,
    WORKERS,
    held_key,
    job_key,
    live_queues_key,
    rq_queue_key,
)
from shared.records import JobRecord
from shared.work import EXECUTION_TTL_S

Standing = Literal["ok", "ended", "lost"]


class Holdings:
    """What a worker holds, as Redis knows it. Safe to share between threads.

    Every method raises redis-py's own errors when Redis cannot be reached.
    """

    def __init__(self, client: redis.Redis, worker: str) -> None:
        self._client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self._worker = worker
        self._restore = script(client, "restore")
        self._settle = script(client, "settle")
        #: The server process in which all that the worker holds is registered; empty before the first.
        self.run_id = ""

    def current_run_id(self) -> str:
        """The run id of the server that answers now."""
        # As the scripts see it, whatever stands between us and the server.
        return str(self._settle(keys=[KNOWN_RUN, SETTLING, WORKERS], args=[self._worker, "", 0]).decode())

    def restore(
        self, record: JobRecord, execution: str, raw: Mapping[bytes, bytes], *, even_if_gone: bool = True
    ) -> Standing:
        """Whether the worker still owns a job, after registering it again where a new server has an older state of it.

        Args:
            record: the job as it was pulled.
            execution: the execution that owned it.
            raw: its hash as it was after the pull.
            even_if_gone: also where a new server has nothing of it. Where the job has ended, it may have been erased.

        Returns:
            `ok`; `ended`, where its end is committed as well; or `lost`, where it has another owner, has ended
            otherwise or was removed.
        """
        moment, origin = now().timestamp(), record.origin
        keys = [
            job_key(record.id),
            rq_queue_key(origin),
            held_key(self._worker),
            JOBS_INDEX,
            WORKERS,
            RQ_QUEUES,
            live_queues_key(record.model),
            ScheduledJobRegistry(origin, self._client).key,
            DeferredJobRegistry(origin, self._client).key,
        ]
        args: list[Any] = [
            record.id,
            execution,
            self._worker,
            origin,
            self.run_id,
            record.attempts,
            int((record.created_at or moment) * 1000),
            moment,
            int(moment) + EXECUTION_TTL_S,
            EXECUTION_TTL_S,
            int(even_if_gone),
            *(x for pair in raw.items() for x in pair),
        ]
        standing: Standing = self._restore(keys=keys, args=args).decode()
        return standing

    def settle(self, run_id: str, grace_s: float) -> None:
        """Say that all that the worker holds is registered in the server with this run id."""
        self._settle(keys=[KNOWN_RUN, SETTLING, WORKERS], args=[self._worker, run_id, int(grace_s * 1000)])
        self.run_id = run_id
