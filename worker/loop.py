"""A loop on a thread of its own, which other threads give things to do."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("slotline.engine")

#: Defects in a row after which the loop gives up, so that a fresh process can take over.
MAX_DEFECTS = 3
#: With nothing to do it looks round this often, in seconds.
IDLE_S = 0.5


class Loop:
    """Goes round until it is told to stop. `tick` and `_on_defect` are what it does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last_tick_at = clock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False

    @property
    def last_tick_age_s(self) -> float:
        """Time since the loop last went round, idle or not. From any thread."""
        return self._clock() - self.last_tick_at

    def stop(self) -> None:
        """Let `run` return after the current tick. From any thread."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Tick until stopped; wait while there is nothing to do.

        Raises:
            Exception: whatever went wrong `MAX_DEFECTS` times in a row.
        """
        defects = 0
        while not self._stopping:
            self._wake.clear()
            try:
                worked = self.tick()
                defects = 0 if worked else defects
            except Exception as error:
                log.exception("a defect in the tick; its requests fail, the others go on")
                self._on_defect(error)
                defects += 1
                if defects == MAX_DEFECTS:
                    raise
                worked = True
            if not worked:
                self._wake.wait(timeout=IDLE_S)

    def tick(self) -> bool:
        """Go round once. Returns whether there was anything to do."""
        raise NotImplementedError

    def _on_defect(self, defect: Exception) -> None:
        """Get over an exception in `tick`."""
        raise NotImplementedError

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _receive(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
