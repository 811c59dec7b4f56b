"""A thread that does something every so often, while anybody needs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

#: How long a ticker stays after its last user: calls that follow one another share one thread.
LINGER_S = 5.0


class Ticker:
    """Runs `work` every `every_s` on a thread of its own, which starts with the first user and ends after the last."""

    def __init__(self, name: str, every_s: float, work: Callable[[], None]) -> None:
        self._name = name
        self._every_s = every_s
        self._work = work
        self._lock = threading.Lock()
        self._users = 0
        self._idle_s = 0.0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def enter(self) -> None:
        """Be a user, until `leave`."""
        with self._lock:
            self._users += 1
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def leave(self) -> None:
        """Be a user no more."""
        with self._lock:
            self._users -= 1

    def close(self) -> None:
        """End the thread, whoever uses it."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self._work()
            except Exception:
                # The next time may go well, and those who need it would otherwise wait for ever.
                log.exception("a defect in %s", self._name)
            if self._retire():
                return

    def _retire(self) -> bool:
        """Whether there has been no user for so long that the thread is to end."""
        with self._lock:
            self._idle_s = 0.0 if self._users else self._idle_s + self._every_s
            if self._idle_s < LINGER_S:
                return False
            self._idle_s = 0.0
            self._thread = None
            return True
