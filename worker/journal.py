"""What a worker has said of its jobs, for a Redis that comes back without its last seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shared.stream import Append
from worker.held import HeldJob
from worker.requests import Event

#: What was said of a job that has ended is kept so long, in seconds, and for so many events of all such jobs.
KEEP_S, KEEP_EVENTS = 120.0, 50_000


@dataclass(frozen=True, slots=True)
class Ending:
    """A job whose end was committed: its job object, and what the engine said last, the end and what was held back."""

    held: HeldJob
    final: dict[str, Any]
    events: list[Event]
    at: float


class Journal:
    """The logged events of the jobs at hand and of those that have just ended. Any thread.

    An event takes some 250 bytes. Those of jobs at hand are bounded by what the slots can generate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, list[Append]] = {}
        self._endings: dict[str, Ending] = {}
        self._kept = 0

    def note(self, events: Iterable[Append]) -> None:
        """Keep events that are about to be written."""
        with self._lock:
            for event in events:
                self._said.setdefault(event.execution, []).append(event)

    def said(self, execution: str) -> list[Append]:
        """What was said of a job, in order, since the worker took it."""
        with self._lock:
            return list(self._said.get(execution, ()))

    def end(self, held: HeldJob, final: dict[str, Any], events: list[Event]) -> None:
        """Keep the end of a job for a while, with what was said before it. One that is said again stays as it was."""
        execution = held.execution.id
        with self._lock:
            if execution in self._endings:
                return
            self._endings[execution] = Ending(held, final, events, self._clock())
            self._kept += self._size(execution)
            self._drop_oldest()

    def ending(self, execution: str) -> Ending | None:
        """How a job has ended, if it has just done so."""
        with self._lock:
            return self._endings.get(execution)

    def endings(self) -> list[Ending]:
        """The jobs that have just ended, oldest first."""
        with self._lock:
            return list(self._endings.values())

    def forget(self, execution: str) -> None:
        """The job goes on elsewhere."""
        with self._lock:
            if execution not in self._endings:
                self._said.pop(execution, None)

    def _drop_oldest(self) -> None:
        latest = self._clock() - KEEP_S
        while self._endings:
            execution, ending = next(iter(self._endings.items()))
            if ending.at >= latest and self._kept <= KEEP_EVENTS:
                return
            self._kept -= self._size(execution)
            del self._endings[execution]
            self._said.pop(execution, None)

    def _size(self, execution: str) -> int:
        return len(self._said.get(execution, ())) + 1
