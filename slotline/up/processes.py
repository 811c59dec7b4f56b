"""Web, batches and worker as child processes, each in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

#: Waits before a child that died is started again.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0

#: A child that has run this long had started well: its next death is a new story.
SETTLED_S = 60.0


class Child:
    """One process of Slotline. The callbacks come from threads of its own.

    It runs in its own session, so that Ctrl-C in the terminal reaches `up` alone, which stops things in order.

    Attributes:
        last_line: the newest line it wrote, which says why it died.
    """

    def __init__(
        self, name: str, env: Mapping[str, str], relay: Callable[[str, str], None], on_exit: Callable[[Child], None]
    ) -> None:
        self.name = name
        self.last_line = ""
        self._env = {**os.environ, **env, "PYTHONUNBUFFERED": "1"}
        self._relay = relay
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def pid(self) -> int | None:
        """The process, also when it has ended; None before the first start."""
        return self._process.pid if self._process is not None else None

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, or start it again."""
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            # -P: the current directory must not shadow our packages.
            [sys.executable, "-P", "-m", "slotline", self.name],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for work in (self._pump, self._wait):
            threading.Thread(
                target=work, args=(self._process,), name=f"{self.name}-{work.__name__}", daemon=True
            ).start()

    def backoff_s(self) -> float:
        """How long to wait before the next start; longer each time it dies young."""
        if time.monotonic() - self._started_at > SETTLED_S:
            self._backoff_s = FIRST_BACKOFF_S
        wait_s, self._backoff_s = self._backoff_s, min(self._backoff_s * 2, MAX_BACKOFF_S)
        return wait_s

    def terminate(self) -> None:
        """Ask it to stop. A worker that is asked twice hands its jobs back at once."""
        if self._process is not None:
            self._process.terminate()

    def join(self, wait_s: float) -> None:
        """Wait until it has ended, at most so long."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)

    def end_group(self, number: signal.Signals) -> None:
        """Send a signal to it and to every process it started."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _pump(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for raw in output:
                line = raw.decode("utf-8", "replace").rstrip()
                self.last_line = line or self.last_line
                self._relay(self.name, line)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._on_exit(self)
