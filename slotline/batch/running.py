"""The loop of a batch: gives lines out, takes what became of them, writes rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from slotline.batch.failures import FailureLimit
from slotline.batch.lines import Line
from slotline.batch.problems import BadInput
from slotline.batch.rows import Outcome, row_of
from slotline.batch.runner import Runner, RunnerLost
from slotline.batch.writing import Output

How = Literal["done", "stopped", "interrupted"]

#: How long to wait for lines to end before the clock is looked at again.
LOOK_S = 0.25


@dataclass(slots=True)
class Tally:
    """Counts of one run."""

    ended: int = 0
    failed: int = 0
    cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_error: str | None = None
    codes: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one line."""
        self.ended += 1
        self.cut += outcome.cut
        self.prompt_tokens += outcome.usage.get("prompt_tokens") or 0
        self.completion_tokens += outcome.usage.get("completion_tokens") or 0
        if outcome.error is not None:
            self.failed += 1
            code = str(outcome.error.get("code"))
            self.codes[code] = self.codes.get(code, 0) + 1
            message = outcome.error.get("message")
            self.first_error = self.first_error or f"line {outcome.line.number}: {message} ({code})"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended, and why if it was not with its last line."""

    how: How
    reason: str | None = None


class Watcher(Protocol):
    """Is told how far the run has come."""

    def look(self, tally: Tally, trouble: str | None) -> None:
        """Called several times a second."""
        ...


class Run:
    """One run over the lines that are left.

    Args:
        lines: those to run, in order; read only as there is room.
        window: most lines that are under way at a time.
        name: makes the ids of OpenAI rows this run's own.
        interrupted: asked several times a second; true ends the run.
    """

    def __init__(
        self,
        lines: Iterator[Line],
        runner: Runner,
        output: Output,
        *,
        window: int,
        limit: FailureLimit,
        name: str,
        watcher: Watcher,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tally = Tally()
        self._lines: Iterator[Line] | None = lines
        self._runner = runner
        self._output = output
        self._window = window
        self._limit = limit
        self._name = name
        self._watcher = watcher
        self._interrupted = interrupted
        self._under_way = 0
        self._broken: BadInput | None = None

    def run(self) -> Ending:
        """Run until every line has ended, or until there is a reason to stop.

        Raises:
            BadInput: the input, which could be read only once, is broken; what was under way has ended by then.
        """
        try:
            while True:
                if self._interrupted():
                    return Ending("interrupted")
                self._give_out()
                if not self._under_way:
                    return self._end()
                self._take(self._runner.ended(LOOK_S))
                reason = self._limit.reason(self.tally.ended, self.tally.failed)
                if reason is not None and (self._under_way or self._lines is not None):
                    return Ending("stopped", reason)
        except RunnerLost as error:
            return Ending("stopped", str(error))

    def _end(self) -> Ending:
        if self._broken is not None:
            raise self._broken
        return Ending("done")

    def _give_out(self) -> None:
        while self._lines is not None and self._under_way < self._window:
            try:
                line = next(self._lines, None)
            except BadInput as error:
                self._broken, line = error, None
            if line is None:
                self._lines = None
                return
            self._runner.start(line)
            self._under_way += 1

    def _take(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._output.write(row_of(outcome, self._name), failed=outcome.failed)
            self.tally.add(outcome)
        self._under_way -= len(outcomes)
        self._output.tick()
        self._watcher.look(self.tally, self._runner.trouble)
