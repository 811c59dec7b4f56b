"""Jobs that somebody waits for on a connection: they end when that caller or this process has gone.

A bound job carries the id of its web process, whose lease is a key in Redis that lives only while the process
renews it. Workers end the bound jobs of a process without a lease.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import RedisError

from shared.jobs import JobStore
from shared.names import web_lease_key
from shared.settings import WebSettings
from webapi.ticker import Ticker

log = logging.getLogger(__name__)

#: How often the lease is renewed, unless it is so short that more is needed.
RENEW_S = 1.0


class Bound:
    """The lease of this web process, and the end of jobs that nobody waits for any more.

    `client` is for the lease alone: its renewal must not wait in line behind the calls that live on it.
    """

    def __init__(self, settings: WebSettings, client: redis.Redis, store: JobStore) -> None:
        self.id = uuid.uuid4().hex
        self._client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self._store = store
        self._lease_ms = int(settings.bound_lease_s * 1000)
        self._renew_s = min(RENEW_S, settings.bound_lease_s / 4)
        self._renewed_at = float("-inf")
        self._lock = threading.Lock()
        self._unwanted: set[str] = set()
        self._ticker = Ticker("bound-lease", self._renew_s, self._tick)

    def enter(self) -> None:
        """Hold the lease until `leave`; it is there on return.

        Raises:
            RedisError: it is not, and need not be left.
        """
        if time.monotonic() - self._renewed_at > 2 * self._renew_s:
            self._renew()
        self._ticker.enter()

    def leave(self) -> None:
        """Hold the lease no more."""
        self._ticker.leave()

    def end(self, job_ids: Iterable[str]) -> None:
        """Cancel jobs, as far as there are any and they have not ended; without Redis, as soon as it is back."""
        ids = list(job_ids)
        try:
            self._store.cancel_many(ids)
        except RedisError as error:
            log.warning("%d jobs are cancelled later: %s", len(ids), error)
            self._put_off(ids)

    def close(self) -> None:
        """End the thread, and the lease with what is still bound to it."""
        self._ticker.close()
        if self._renewed_at != float("-inf"):
            with suppress(RedisError):  # it expires by itself
                self._client.delete(web_lease_key(self.id))
        self._client.close()

    def _put_off(self, job_ids: list[str]) -> None:
        with self._lock:
            if not self._unwanted:
                self._ticker.enter()
            self._unwanted.update(job_ids)

    def _renew(self) -> None:
        moment = time.monotonic()
        # A Redis that is full takes this, unlike SET.
        if not self._client.pexpire(web_lease_key(self.id), self._lease_ms):
            self._client.set(web_lease_key(self.id), "1", px=self._lease_ms)
        self._renewed_at = moment

    def _tick(self) -> None:
        try:
            self._renew()
            self._end_unwanted()
        except RedisError as error:
            log.debug("the lease of this process waits for Redis: %s", error)

    def _end_unwanted(self) -> None:
        with self._lock:
            due = set(self._unwanted)
        if not due:
            return
        self._store.cancel_many(sorted(due))
        with self._lock:
            self._unwanted -= due
            if not self._unwanted:
                self._ticker.leave()
