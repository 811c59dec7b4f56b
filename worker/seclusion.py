"""A job that has crashed its process again and again runs with no other beside it, so that it can harm none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from worker.held import HeldJob


class Seclusion:
    """Lets jobs through to be prepared; one that is to run alone when all others have left.

    While such a job is held, the worker pulls no other one (`Workload.room`). Main thread only, save `forget`.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[HeldJob]], None],
        clear: Callable[[], None],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have jobs prepared by `begin`; `clear` hands back the others once they have had `patience_s` to end."""
        self._begin = begin
        self._clear = clear
        self._patience_s = patience_s
        self._clock = clock
        self._waits: HeldJob | None = None
        self._clear_at: float | None = None

    def put(self, jobs: Sequence[HeldJob]) -> None:
        """Begin with jobs that were pulled together, but for one that is to run alone."""
        if others := [held for held in jobs if not held.runs_alone]:
            self._begin(others)
        for held in jobs:
            if held.runs_alone:
                self._waits, self._clear_at = held, self._clock() + self._patience_s

    def look(self, jobs: int) -> None:
        """Begin with the one that waits if it is the only one of `jobs` that are worked on."""
        if self._waits is None:
            return
        if jobs == 1:
            self._begin([self._waits])
            self._waits = None
        elif self._clear_at is not None and self._clock() >= self._clear_at:
            self._clear_at = None
            self._clear()

    def take(self) -> HeldJob | None:
        """The one that waits, which is then forgotten here."""
        waits, self._waits = self._waits, None
        return waits

    def forget(self, execution: str) -> None:
        """Forget the job of an execution, which has another owner now. From any thread."""
        waits = self._waits
        if waits is not None and waits.execution.id == execution:
            self._waits = None
