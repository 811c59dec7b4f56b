"""What runs lines: a server somewhere, or processes of our own."""

from __future__ import annotations

from typing import Protocol

from slotline.batch.lines import Line
from slotline.batch.rows import Outcome

#: Lines given out at a time for each slot, so that none waits for the next.
LINES_PER_SLOT = 4

#: A line is always sent with this, unless it says otherwise.
PRIORITY = "batch"


class RunnerLost(Exception):
    """Nothing can be run any more, or could be run at all; what was under way is not done. The message says why."""


class Runner(Protocol):
    """Runs many lines at once. One thread only.

    Attributes:
        model: the name of the model that lines go to which name none.
        slots: how many lines generate at the same time.
        where: what it runs on, for people.
    """

    model: str
    slots: int
    where: str

    def start(self, line: Line) -> None:
        """Begin with a line. The caller bounds how many are under way."""
        ...

    def ended(self, wait_s: float) -> list[Outcome]:
        """Lines that have ended, each once; waits at most `wait_s` for the first.

        Raises:
            RunnerLost: no more can be had.
        """
        ...

    @property
    def trouble(self) -> str | None:
        """What stands in the way just now, such as a full queue."""
        ...

    def count_tokens(self, text: str) -> int:
        """Number of tokens of a text.

        Raises:
            RunnerLost: it cannot be counted.
        """
        ...

    def close(self) -> None:
        """Cancel what is under way and let go of everything. A second call does nothing."""
        ...
