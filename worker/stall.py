"""Whether an engine stands still, as its parent sees it from outside."""

from __future__ import annotations

import time
from collections.abc import Callable

#: No more than this counts of the time between two looks: whoever was stopped or held up for longer has seen nothing
#: of it, and the engine may have been stopped with him.
MOST_GAP_S = 2.0


class StallWatch:
    """Compares how often the engine has gone round with what it was at the last look."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Call it a stall after `timeout_s`; 0 for never."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_at = clock()
        self._ticks = 0
        self._stood_s = 0.0

    def has_stalled(self, ticks: int) -> bool:
        """Whether the engine, now at so many rounds, has stood still for too long; 0 if it need not move."""
        now = self._clock()
        gap_s, self._looked_at = now - self._looked_at, now
        moved, self._ticks = ticks != self._ticks, ticks
        self._stood_s = 0.0 if moved or not ticks else self._stood_s + min(gap_s, MOST_GAP_S)
        return 0 < self._timeout_s < self._stood_s
