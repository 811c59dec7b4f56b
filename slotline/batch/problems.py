"""What is wrong with an input, line by line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: So many bad lines are shown; the others are counted.
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A line whose structure is broken; `line` counts from 1, None for the whole file."""

    line: int | None
    message: str

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


class BadLine(Exception):
    """A line is broken. The message does not name the line."""


class BadInput(Exception):
    """The input cannot be run. The message has a line for each problem, up to `SHOWN`."""

    def __init__(self, problems: Iterable[Problem], more: int = 0) -> None:
        shown = [str(problem) for problem in problems]
        if more:
            shown.append(f"and {more} more")
        super().__init__("\n".join(shown))


class Problems:
    """Collects problems; flat in memory, however many there are."""

    def __init__(self) -> None:
        self._first: list[Problem] = []
        self._count = 0

    def add(self, problem: Problem) -> None:
        """Count one, and keep it if it is among the first."""
        self._count += 1
        if len(self._first) < SHOWN:
            self._first.append(problem)

    def check(self) -> None:
        """Raise what has come together.

        Raises:
            BadInput: there was one at least.
        """
        if self._first:
            raise BadInput(self._first, self._count - len(self._first))
