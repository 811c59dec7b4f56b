"""How a child is stopped: with patience, and with less after a second Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from slotline.up.leftovers import end, find_marked
from slotline.up.processes import Child

#: How long a child may go on after a second Ctrl-C, and how often it is asked again.
HURRY_S, ASK_AGAIN_S = 10.0, 0.5

#: A killed process ends as soon as the kernel lets it.
KILLED_S = 5.0


class Stopper:
    """Stops one child after the other and remembers that there is a hurry.

    Args:
        directory: the data directory, which marks the processes.
        take: waits so many seconds for an event; a signal is a `signal.Signals`.
        say: shows a line.
    """

    def __init__(self, directory: Path, take: Callable[[float], object], say: Callable[[str], None]) -> None:
        self._directory = directory
        self._take = take
        self._say = say
        self._hurry = False

    def stop(self, child: Child, limit_s: float) -> None:
        """Ask a child to stop, wait at most `limit_s`, then end it and all it has started."""
        child.terminate()
        deadline = time.monotonic() + limit_s
        while child.is_running:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._say(f"{child.name} did not stop in time and is ended")
                child.end_group(signal.SIGKILL)
                child.join(KILLED_S)
                break
            event = self._take(min(left_s, ASK_AGAIN_S) if self._hurry else left_s)
            if isinstance(event, signal.Signals):
                self._hurry = True
                deadline = min(deadline, time.monotonic() + HURRY_S)
            if self._hurry and child.is_running:
                child.terminate()
        end(find_marked(self._directory, [child.name]))
