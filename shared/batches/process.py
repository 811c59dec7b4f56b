"""The process behind `slotline batches`: it takes open batches, runs each on a thread, and sweeps what has expired."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from redis.exceptions import RedisError

from shared.batches.records import BatchRecord
from shared.batches.runner import WAIT_S, Lease, Runner, Tools
from shared.batches.store import BatchStore
from shared.connection import connect, wait_until_up
from shared.errors import RedisUnavailable, StorageUnavailable
from shared.files import FileStore
from shared.jobs import JobStore
from shared.names import BATCH_PROCESSES
from shared.registry import Registry
from shared.settings import BatchSettings
from shared.storage import Storage, storage_of

log = logging.getLogger("slotline.batches")

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_REDIS = 69  # EX_UNAVAILABLE of sysexits.h

#: How often open batches are looked for, and what has expired is removed.
LOOK_S, SWEEP_S = 0.5, 60.0
#: A process that has said nothing for so long counts as not there.
SILENT_S = 15.0
#: A batch whose runner broke is left alone for so long.
BROKEN_S = 30.0
#: How long runners may take to write what they have when the process is to end.
STOP_S = 20.0
SWEEPER_S = 5.0


def run(settings: BatchSettings) -> int:
    """Run batches until told to stop. Returns the exit status."""
    configure_logging(settings.log_level)
    client = connect(settings)
    try:
        storage = storage_of(settings)
        check_storage(storage)
        wait_until_up(client, settings.redis_wait_s)
    except StorageUnavailable as error:
        return _give_up(error.message, EXIT_CONFIG)
    except RedisUnavailable as error:
        return _give_up(error.message, EXIT_REDIS)
    finally:
        client.close()
    process = Process(settings, storage)
    signal.signal(signal.SIGTERM, process.on_signal)
    signal.signal(signal.SIGINT, process.on_signal)
    return process.run()


def configure_logging(level: str) -> None:
    """One line a record, on standard error."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.Formatter.converter = time.gmtime


def check_storage(storage: Storage) -> None:
    """See whether the storage can be used; one that is only away at the moment is logged.

    Raises:
        StorageUnavailable: there is no such kind of storage, or its package is missing.
    """
    try:
        storage.size("manifest.json")  # any name will do
    except FileNotFoundError:
        return
    except StorageUnavailable as error:
        if isinstance(error.__cause__, ValueError | ImportError):
            raise
        log.warning("%s", error.message)


def check(settings: BatchSettings) -> list[str]:
    """The processes of this host that have said lately that they live, for health checks.

    Raises:
        RedisError: Redis cannot be asked.
    """
    client: Any = connect(settings)
    try:
        names = client.zrangebyscore(BATCH_PROCESSES, time.time() - SILENT_S, math.inf)
    finally:
        client.close()
    found = [name.decode() for name in names]
    return [name for name in found if name.startswith(f"{socket.gethostname()}-")]


def _give_up(message: str, status: int) -> int:
    print(f"slotline batches: {message}", file=sys.stderr)
    return status


class Process:
    """Holds leases and the threads that run their batches.

    Args:
        settings: the limits, and the way to Redis.
        storage: where files are.
        clock: monotonic seconds.

    Attributes:
        name: names it among all that run batches.
    """

    def __init__(self, settings: BatchSettings, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        # Each runner needs a connection while it waits for the end of a job.
        self._client: Any = connect(
            settings, timeout_s=settings.redis_timeout_s + WAIT_S, connections=4 + settings.batches_at_once
        )
        self._batches = BatchStore(self._client, settings)
        self._files = FileStore(self._client, storage, settings)
        jobs, registry = JobStore(self._client, settings), Registry(self._client)
        self._tools = Tools(self._batches, self._files, jobs, registry, settings)
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._running: dict[str, tuple[Lease, Runner, threading.Thread]] = {}
        self._broken: dict[str, float] = {}
        self._stopping = threading.Event()
        self._next_sweep = 0.0
        self._sweeper: threading.Thread | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask the process to stop."""
        self._stopping.set()

    def stop(self) -> None:
        """Ask the process to stop. Any thread may call it."""
        self._stopping.set()

    def run(self) -> int:
        """Work until told to stop. Returns the exit status."""
        log.info("%s runs batches, %d at once", self.name, self._settings.batches_at_once)
        try:
            while not self._stopping.is_set():
                try:
                    self.turn()
                except RedisError as error:
                    log.warning("Redis cannot be asked for batches: %s", error)
                self._stopping.wait(min(LOOK_S, self._settings.batch_lease_s / 4))
        finally:
            self._stop_all()
            if self._sweeper is not None:
                # It uses the connections that are closed next; a storage that hangs does not hold us up for long.
                self._sweeper.join(timeout=SWEEPER_S)
            self._client.close()
        return EXIT_OK

    def turn(self) -> None:
        """Renew leases, part from runners that are through, and take batches that nobody runs.

        Raises:
            RedisError: try again.
        """
        self._renew()
        self._part()
        self._take()
        self._sweep()
        self._client.zadd(BATCH_PROCESSES, {self.name: self._batches.clock()})

    def _renew(self) -> None:
        for lease, _, _ in list(self._running.values()):
            since = self._clock()
            if self._batches.renew(lease.batch_id, lease.fence, self._settings.batch_lease_s):
                lease.until = since + self._settings.batch_lease_s
            else:
                lease.is_lost = True

    def _part(self) -> None:
        for batch_id, (lease, _, thread) in list(self._running.items()):
            if not thread.is_alive():
                thread.join()
                del self._running[batch_id]
                self._batches.release(batch_id, lease.fence)

    def _take(self) -> None:
        for batch in self._batches.open_batches():
            if len(self._running) >= self._settings.batches_at_once:
                return
            if batch.id not in self._running and self._is_wanted(batch):
                self._start(batch)

    def _is_wanted(self, batch: BatchRecord) -> bool:
        """A batch that is paused needs nobody until it is resumed, cancelled or late."""
        if self._clock() < self._broken.get(batch.id, 0.0):
            return False
        return not batch.paused or batch.status == "cancelling" or self._batches.clock() >= batch.expires_at

    def _start(self, batch: BatchRecord) -> None:
        since = self._clock()
        fence = self._batches.acquire(batch.id, self.name, self._settings.batch_lease_s)
        if fence is None:
            return
        lease = Lease(batch.id, fence, since + self._settings.batch_lease_s)
        runner = Runner(self._tools, lease, self._clock)
        # A storage that hangs must not keep the process from ending: whatever it leaves is taken up by the next.
        thread = threading.Thread(target=self._guard, args=(batch.id, runner), name=f"runner-{batch.id}", daemon=True)
        self._running[batch.id] = (lease, runner, thread)
        thread.start()

    def _guard(self, batch_id: str, runner: Runner) -> None:
        try:
            runner.run()
        except Exception:
            log.exception("batch %s: its runner broke; it is taken up again in %g s", batch_id, BROKEN_S)
            self._broken[batch_id] = self._clock() + BROKEN_S

    def _sweep(self) -> None:
        """On a thread of its own: many objects in a bucket take longer than a lease lasts."""
        if self._clock() < self._next_sweep or (self._sweeper is not None and self._sweeper.is_alive()):
            return
        self._next_sweep = self._clock() + SWEEP_S
        self._client.zremrangebyscore(BATCH_PROCESSES, 0, self._batches.clock() - SWEEP_S)
        self._sweeper = threading.Thread(target=self._remove_expired, name="sweeper", daemon=True)
        self._sweeper.start()

    def _remove_expired(self) -> None:
        try:
            gone = self._files.sweep() + self._batches.sweep()
        except (RedisError, StorageUnavailable) as error:
            log.warning("what has expired could not be removed: %s", error)
            return
        if gone:
            log.info("%d expired files and batches were removed", gone)

    def _stop_all(self) -> None:
        """Let runners write what they have, renewing their leases meanwhile, and give the leases up."""
        for _, runner, _ in self._running.values():
            runner.stop()
        deadline = self._clock() + STOP_S
        while self._running and self._clock() < deadline:
            try:
                self._renew()
                self._part()
            except RedisError as error:
                log.warning("a lease could not be given up: %s", error)
            for _, _, thread in self._running.values():
                thread.join(WAIT_S / 10)
