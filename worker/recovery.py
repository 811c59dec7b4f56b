"""What dead workers held is taken back: by every worker, and by the parent of each.

A worker is dead when its lease has run out, but leases also run out for nothing: while Redis is away, or the machine
sleeps. So nobody acts on them before Redis has been well for as long as everybody alive needs to renew theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from shared.errors import JobNotFound, WorkerLost
from shared.jobs import JobStore
from shared.names import lease_key
from shared.reading import answer_so_far
from shared.records import job_object
from shared.settings import WorkerSettings
from shared.work import Doomed, End, Reclaimed, log_ttl_s

log = logging.getLogger("slotline.recovery")

#: Rounds come so often, in seconds, or more often where leases are short.
ROUND_S = 1.0
#: How long somebody who was cut off takes from the end of his time limit to his next lease.
RETURN_S = 1.0


class Recovery:
    """Whether leases can be trusted, and what follows where they can.

    Somebody calls `begin_round`, writes to Redis, and calls `end_round`, again and again, every `round_s`; and
    `note_outage` when Redis did not answer. One thread only.

    Attributes:
        round_s: how long from one round to the next.
        trust_s: how long Redis has to have been well before leases are trusted: as long as a lease lasts, and as long
            as somebody takes who has yet to notice that his connection is dead.
    """

    def __init__(self, store: JobStore, settings: WorkerSettings, caller: str = "") -> None:
        """Take back for the worker `caller`; empty for a parent, which holds no jobs."""
        self._store = store
        self._caller = caller
        self._failure_ttl_s = settings.failure_ttl_s
        self._lease_s = settings.lease_s
        # A short lease has to be renewed before it runs out.
        self.round_s = min(ROUND_S, settings.lease_s / 3)
        self.trust_s = max(settings.lease_s, settings.redis_timeout_s + RETURN_S)
        # A Redis that stood still for longer than this may have let leases run out.
        self._slow_s = max(ROUND_S, settings.lease_s / 3)
        self._healthy_since: float | None = None
        self._began = 0.0
        self._began_at = time.time()

    @property
    def is_healthy(self) -> bool:
        """Whether Redis answered the last time it was asked."""
        return self._healthy_since is not None

    @property
    def trusts_leases(self) -> bool:
        """Whether a lease that is not there means that its holder is dead."""
        now, since = time.monotonic(), self._healthy_since
        return since is not None and now - since >= self.trust_s and now - self._began <= self._slow_s

    def note_outage(self) -> None:
        """Leases have run out for nothing."""
        self._healthy_since = None

    def begin_round(self) -> None:
        """Call this before anything is asked of Redis.

        A machine that was suspended shows by the wall clock, since the monotonic one stands still meanwhile; and a
        process that was stopped by either. That somebody sets the clock only costs a lease.
        """
        slept_s = time.time() - self._began_at
        self._began, self._began_at = time.monotonic(), time.time()
        if slept_s > self._lease_s:
            self._healthy_since = None

    def end_round(self) -> None:
        """Call this once Redis has taken a write and has answered all that was asked."""
        now = time.monotonic()
        if now - self._began > self._slow_s:
            # It may have stood still, and others have yet to renew their leases.
            self._healthy_since = now
        else:
            self._healthy_since = self._healthy_since or now

    def check_writable(self, name: str) -> None:
        """The write of somebody who has no lease to renew.

        Where Redis is full or read-only, it answers well and nobody can renew a lease.

        Raises:
            RedisError: Redis takes no writes.
        """
        self._store.client.set(lease_key(name), "1", px=int(self._lease_s * 1000))

    def take_back(self) -> list[str]:
        """Take over from workers without a lease, if leases are trusted.

        Returns the ids of jobs that `caller` now holds, whose end is committed and still to be recorded.
        """
        if not self.trusts_leases:
            return []
        found = self._store.reclaim(self._caller)
        self._settle(found, "a worker that is gone")
        return found.committed

    def bury(self, dead: str, blamed: Iterable[str]) -> None:
        """Take over from a worker whose process was seen to end; see `WorkStore.bury`."""
        self._settle(self._store.bury(dead, blamed), dead)

    def _settle(self, found: Reclaimed, dead: str) -> None:
        if found.queued:
            log.warning("took back %d jobs of %s: %s", len(found.queued), dead, ", ".join(found.queued))
        if found.cancelled:
            self._store.cancel_many(found.cancelled)
        if found.doomed:
            self._fail(found.doomed)

    def _fail(self, doomed: Sequence[Doomed]) -> None:
        """Commit the ends of jobs that may not run again. Whoever takes over next finds that and records it."""
        for lost in doomed:
            try:
                record = self._store.fetch(lost.job_id)
            except JobNotFound:
                continue
            log.error("job %s is failed: its process died %d times", lost.job_id, lost.crashes)
            tokens = self._store.stream.tokens(lost.job_id)
            ttl_s = self._failure_ttl_s if record.failure_ttl_s is None else record.failure_ttl_s
            final = job_object(
                record,
                status="failed",
                ended_at=time.time(),
                ttl_s=ttl_s if ttl_s >= 0 else None,
                error=WorkerLost(lost.crashes).to_dict(),
                **answer_so_far(tokens),
            )
            self._store.commit([End(lost.job_id, lost.execution, final, len(tokens), log_ttl_s(ttl_s))])
