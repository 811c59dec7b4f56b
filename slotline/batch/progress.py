"""How far a run has come: a bar in a terminal, a line now and then elsewhere, both on standard error."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from slotline.batch.running import Tally

#: Without a terminal a line is written this often.
LINE_S = 30.0

#: Rates are those of the last so many seconds.
PACE_S = 60.0


class Pace:
    """Lines and tokens per second over the last `PACE_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, int]] = deque([(clock(), 0, 0)])

    def note(self, lines: int, tokens: int) -> None:
        """Take down the counts so far."""
        now = self._clock()
        if len(self._samples) == 1 or now - self._samples[-1][0] >= 1:
            self._samples.append((now, lines, tokens))
        else:
            self._samples[-1] = (self._samples[-1][0], lines, tokens)
        while len(self._samples) > 2 and now - self._samples[0][0] > PACE_S:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """Lines and tokens per second."""
        (began, lines, tokens), (_, lines_now, tokens_now) = self._samples[0], self._samples[-1]
        span_s = max(self._clock() - began, 1e-3)
        return (lines_now - lines) / span_s, (tokens_now - tokens) / span_s


class Display:
    """Shows a run's progress. Use it in a `with` block.

    Args:
        total: lines in all; None where nobody knows.
        done: those that have their row already.
        console: on standard error.
    """

    def __init__(
        self,
        total: int | None,
        done: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._done = done
        self._clock = clock
        self._pace = Pace(clock)
        self._said_at = clock()
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total, completed=done, note="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def look(self, tally: Tally, trouble: str | None) -> None:
        """See `Watcher`."""
        self._pace.note(tally.ended, tally.completion_tokens)
        if self._bar is not None:
            note = self._note(tally, trouble)
            self._bar.update(self._task, completed=self._done + tally.ended, note=note)
        elif self._clock() - self._said_at >= LINE_S:
            self._said_at = self._clock()
            of = f" of {self._total}" if self._total is not None else ""
            lines = f"{self._done + tally.ended}{of} lines"
            print(f"slotline: {lines}, {self._note(tally, trouble)}", file=sys.stderr, flush=True)

    def _note(self, tally: Tally, trouble: str | None) -> str:
        lines_s, tokens_s = self._pace.rates()
        parts = [f"{lines_s:.1f} lines/s", f"{tokens_s:.0f} tokens/s"]
        if self._total is not None and lines_s > 0:
            parts.append(f"{duration((self._total - self._done - tally.ended) / lines_s)} left")
        if tally.failed:
            parts.append(f"{tally.failed} failed")
        if trouble:
            parts.append(f"waiting: {trouble}")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time span as people say it: `12 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
