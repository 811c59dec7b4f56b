"""`slotline worker`: a small parent that keeps a model process alive and runs RQ's scheduler.

The parent never loads a model, so that the scheduler may fork from it (a fork of a process that has touched the
GPU cannot use it), and a crash of the model takes nothing else with it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from redis.exceptions import RedisError
from rq.scheduler import RQScheduler

from shared.connection import connect, wait_until_up
from shared.errors import RedisUnavailable
from shared.names import DEFAULT_MODEL, PRIORITIES, SERIALIZER, queue_name
from shared.settings import PREFIX, WorkerSettings
from worker.model_process import EXIT_CONFIG, EXIT_DRAINED, EXIT_REDIS, configure_logging

log = logging.getLogger("slotline.parent")

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
#: A model process that ran this long was well; the next crash starts the back-off anew.
WELL_AFTER_S = 60.0
#: How often a scheduler that died, or whose locks another one held, is tried again.
SCHEDULER_CHECK_S = 10.0


def run(settings: WorkerSettings) -> int:
    """Keep a model process running until told to stop. Returns the exit status."""
    configure_logging(settings.log_level)
    client = connect(settings)
    try:
        wait_until_up(client, settings.redis_wait_s)
    except RedisUnavailable as error:
        print(f"slotline worker: {error}", file=sys.stderr)
        return EXIT_REDIS
    return Parent(settings, client).run()


class Parent:
    """Starts, watches and restarts the model process."""

    def __init__(self, settings: WorkerSettings, client: Any) -> None:
        self._settings = settings
        self._scheduler = Scheduler(
            [queue_name(m, p) for m in (settings.model_name, DEFAULT_MODEL) for p in PRIORITIES],
            connection=client,
            serializer=SERIALIZER,
            logging_level=logging.WARNING,
        )
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Return the exit status of the last model process."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        backoff = FIRST_BACKOFF_S
        try:
            while True:
                started = time.monotonic()
                status = self._run_child()
                if self._stopping or status in (EXIT_DRAINED, EXIT_CONFIG, EXIT_REDIS):
                    return max(status, 0) if not self._stopping else EXIT_DRAINED
                if time.monotonic() - started > WELL_AFTER_S:
                    backoff = FIRST_BACKOFF_S
                log.error("the model process ended with status %d; a new one starts in %g s", status, backoff)
                if self._pause(backoff):
                    return EXIT_DRAINED
                backoff = min(2 * backoff, MAX_BACKOFF_S)
        finally:
            self._scheduler.end()

    def _run_child(self) -> int:
        command = [sys.executable, "-P", "-m", "slotline", "worker", f"--model-process-of={os.getpid()}"]
        # A session of its own: Ctrl-C in a terminal must reach it once, through us.
        self._child = subprocess.Popen(command, env=child_environment(self._settings), start_new_session=True)
        if self._stopping:
            self._child.send_signal(signal.SIGTERM)
        next_check = 0.0
        while True:
            if not self._stopping and time.monotonic() >= next_check:
                self._scheduler.ensure()
                next_check = time.monotonic() + SCHEDULER_CHECK_S
            try:
                return self._child.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue

    def _pause(self, seconds: float) -> bool:
        """Wait; returns at once and True when told to stop."""
        deadline = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._stopping

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)


class Scheduler(RQScheduler):
    """RQ's scheduler, which ends with its parent and is restarted by it."""

    def heartbeat(self) -> None:
        """Runs in the scheduler's process, once a second."""
        super().heartbeat()
        if os.getppid() != self.parent_pid:
            self._stop_requested = True

    parent_pid = 0

    def ensure(self) -> None:
        """Start the scheduler if none runs for our queues; the locks see to it that there is only one."""
        if self._process is not None and self._process.is_alive():
            return
        self.parent_pid = os.getpid()
        try:
            self.acquire_locks(auto_start=True)
        except RedisError as error:
            log.warning("the scheduler could not start: %s", error)

    def end(self) -> None:
        """Stop it and wait for it."""
        if self._process is not None and self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout=5)
        try:
            self.release_locks()
        except RedisError as error:
            log.warning("the scheduler's locks could not be released: %s", error)


def child_environment(settings: WorkerSettings) -> dict[str, str]:
    """Our environment with every setting that was given, so that flags reach the model process too."""
    given = {
        f"{PREFIX}{field.upper()}": str(value)
        for field, value in settings.model_dump(mode="json").items()
        if field in settings.model_fields_set and value is not None
    }
    return {**os.environ, "GGML_NO_BACKTRACE": "1", **given}
