"""Waits at the doorbells of those jobs that a worker has room for, on a thread of its own.

A doorbell is a list in Redis with at most one entry: jobs of a model and a priority may wait. Whoever takes the entry
looks; what it leaves behind it rings for again (`pull.lua`). So a worker must not take entries for jobs that it has no
room for, and passes on the one that it took too late.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import redis
from redis.exceptions import RedisError

from shared.names import DEFAULT_MODEL, PRIORITIES, doorbell_key, wake_key

log = logging.getLogger("slotline.worker")

#: The longest wait of one command, and how long a wake that nobody needed any more may lie there.
WAIT_S = 2.0
WAKE_TTL_S = 60
#: After an error, wait so long before the next try.
RETRY_S = 0.25


class Doorbell:
    """Calls `on_ring`, on its thread, when one of the doorbells that are listened to has rung.

    After a ring it waits until that was taken and `listen` was called, so that it never listens to what is out of
    date. `listen`, `take` and `stop` belong to one other thread.

    Args:
        client: Redis; the wait takes a connection of its own from its pool.
        worker: whose wait it is.
        model: whose doorbells, and those of `default`.
        on_ring: see above.
        timeout_s: the time limit of one command, which no wait may come near.
    """

    def __init__(
        self, client: redis.Redis, worker: str, model: str, on_ring: Callable[[], None], timeout_s: float
    ) -> None:
        self._client: Any = client
        self._wait_s = min(WAIT_S, timeout_s / 2)
        self._bells = [[doorbell_key(m, priority) for m in (model, DEFAULT_MODEL)] for priority in PRIORITIES]
        self._wake = wake_key(worker)
        self._on_ring = on_ring
        self._changed = threading.Condition()
        self._wanted: tuple[str, ...] = ()
        #: What the command that is under way waits for.
        self._at: tuple[str, ...] = ()
        self._rung: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="doorbell")

    def start(self) -> None:
        """Start the thread; it listens to nothing yet."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and ring again what was not taken."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            waits = bool(self._at)
        try:
            if waits:
                self._end_wait()
            self._thread.join()
            if (rung := self.take()) is not None:
                self.ring(rung)
        except RedisError as error:
            log.warning("no answer from Redis at the doorbells: %s", error)
            self._thread.join()

    def listen(self, levels: Iterable[int]) -> None:
        """Listen to the doorbells of these places in `PRIORITIES`, and to no others.

        A wait for more than that goes on, since it costs more to end it than to pass one ring on.

        Raises:
            RedisError: it could not be told that it is to listen to more; it will within `WAIT_S`.
        """
        wanted = tuple(bell for level in levels for bell in self._bells[level])
        with self._changed:
            self._wanted = wanted
            self._changed.notify()
            waits_for_less = bool(self._at) and not set(wanted) <= set(self._at)
        if waits_for_less:
            self._end_wait()

    def take(self) -> str | None:
        """The doorbell that has rung since the last call."""
        with self._changed:
            rung, self._rung = self._rung, None
            return rung

    def ring(self, bell: str) -> None:
        """Ring for another worker.

        Raises:
            RedisError: Redis did not take it.
        """
        with self._client.pipeline() as pipe:
            pipe.lpush(bell, "1")
            pipe.ltrim(bell, 0, 0)
            pipe.execute()

    def is_for(self, bell: str, levels: Iterable[int]) -> bool:
        """Whether a doorbell is one of these priorities'."""
        return any(bell in self._bells[level] for level in levels)

    def _end_wait(self) -> None:
        with self._client.pipeline() as pipe:
            pipe.lpush(self._wake, "1")
            pipe.expire(self._wake, WAKE_TTL_S)
            pipe.execute()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or (self._wanted and self._rung is None))
                if self._stopping:
                    return
                self._at = self._wanted
            rung = self._wait()
            with self._changed:
                self._at = ()
                if rung is not None:
                    self._rung, self._wanted = rung, ()
            if rung is not None:
                self._on_ring()

    def _wait(self) -> str | None:
        """One command: the doorbell that rang, None if none did."""
        try:
            reply = self._client.blpop([self._wake, *self._at], timeout=self._wait_s)
        except RedisError as error:
            log.warning("no answer from Redis at the doorbells, trying again: %s", error)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, RETRY_S)
            return None
        bell = reply[0].decode() if reply is not None else self._wake
        return None if bell == self._wake else bell
