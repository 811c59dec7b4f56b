"""`slotline worker`: a small parent that keeps a model process alive and runs RQ's scheduler.

The parent never loads a model, so that the scheduler may fork from it (a fork of a process that has touched the
GPU cannot use it), and a crash of the model takes nothing else with it. It is the first to see such a crash: it gives
back at once what the process held, and it takes over from other dead workers while a new model is being loaded.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from redis.exceptions import RedisError
from rq.scheduler import RQScheduler

from shared.connection import connect, wait_until_up
from shared.errors import RedisUnavailable
from shared.jobs import JobStore
from shared.names import DEFAULT_MODEL, PRIORITIES, SERIALIZER, queue_name
from shared.settings import PREFIX, WorkerSettings
from worker.black_box import BlackBox
from worker.model_process import EXIT_CONFIG, EXIT_DRAINED, EXIT_REDIS, configure_logging
from worker.recovery import Recovery
from worker.stall import StallWatch

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
        self._box = BlackBox.to_share()
        self._undertaker = Undertaker(Recovery(JobStore(client, settings), settings))
        self._next_scheduler_check = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Return the exit status of the last model process."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        backoff, has_served = FIRST_BACKOFF_S, False
        try:
            while True:
                started = time.monotonic()
                status = self._run_child()
                has_served = has_served or bool(self._box.name)
                # One that ended by itself was not ended by what it worked on.
                self._undertaker.bury(self._box.name, self._box.executions if status < 0 else [])
                if self._stopping:
                    return EXIT_DRAINED
                # An outage that came later is waited for, however long.
                if status in (EXIT_DRAINED, EXIT_CONFIG) or (status == EXIT_REDIS and not has_served):
                    return status
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
        self._box.clear()
        file = self._box.file
        assert file is not None
        # A session of its own: Ctrl-C in a terminal must reach it once, through us.
        self._child = child = subprocess.Popen(
            [*command, f"--black-box={file}"],
            env=child_environment(self._settings),
            start_new_session=True,
            pass_fds=[file],
        )
        if self._stopping:
            child.send_signal(signal.SIGTERM)
        stall = StallWatch(self._settings.stall_timeout_s)
        while True:
            self._go_round()
            if stall.has_stalled(self._box.ticks):
                log.error("the engine has stood still for %g s; its process is ended", self._settings.stall_timeout_s)
                child.kill()
            try:
                return child.wait(timeout=self._undertaker.round_s)
            except subprocess.TimeoutExpired:
                continue

    def _go_round(self) -> None:
        """What has to be done again and again, whether a model process lives or not."""
        self._undertaker.look()
        if not self._stopping and time.monotonic() >= self._next_scheduler_check:
            self._scheduler.ensure()
            self._next_scheduler_check = time.monotonic() + SCHEDULER_CHECK_S

    def _pause(self, seconds: float) -> bool:
        """Wait; returns at once and True when told to stop."""
        deadline = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < deadline:
            self._go_round()
            time.sleep(0.05)
        return self._stopping

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)


class Undertaker:
    """Takes jobs back from model processes of ours that have ended, and from all workers whose lease has run out.

    What Redis does not answer is tried again in the next round.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._name = f"parent-{socket.gethostname()}-{os.getpid()}"
        self._ended: dict[str, list[str]] = {}
        self._next = 0.0
        self.round_s = recovery.round_s

    def bury(self, worker: str, blamed: list[str]) -> None:
        """Take back what a worker held that has ended; its black box says which executions it worked on."""
        if worker:  # otherwise it did not come so far as to have a name
            self._ended[worker] = blamed
            self._next = 0.0
            self.look()

    def look(self) -> None:
        """Go round if it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.round_s
        try:
            self._go_round()
        except RedisError as error:
            if self._recovery.is_healthy:
                log.warning("no answer from Redis, trying again: %s", error)
            self._recovery.note_outage()

    def _go_round(self) -> None:
        self._recovery.begin_round()
        self._recovery.check_writable(self._name)
        for worker in list(self._ended):
            self._recovery.bury(worker, self._ended[worker])
            del self._ended[worker]
        self._recovery.end_round()
        self._recovery.take_back()


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
