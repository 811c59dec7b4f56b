"""One `slotline batch run` from its first look at the input to its exit status."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slotline.batch.backends import Backend, Server
from slotline.batch.failures import FailureLimit
from slotline.batch.index import LineIndex
from slotline.batch.lines import LineReader, Rules
from slotline.batch.manifest import claim
from slotline.batch.options import check_options
from slotline.batch.progress import Display, duration
from slotline.batch.reading import Source
from slotline.batch.runner import LINES_PER_SLOT
from slotline.batch.running import Ending, Run, Tally
from slotline.batch.survey import lines_left, survey
from slotline.batch.writing import STDOUT, Order, Output, unsorted_path

#: Exit statuses. Bad usage and bad input are 2, which the command sees to.
ALL_SERVED, SOME_FAILED, STOPPED_EARLY, INTERRUPTED = 0, 1, 3, 130


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command was told, beyond the rules for lines."""

    out: str
    errors: Path | None = None
    order: Order = "finished"
    limit: int | None = None
    max_failures: FailureLimit = FailureLimit()  # noqa: RUF009 - frozen
    overwrite: bool = False
    window: int | None = None


class Session:
    """Runs an input with a backend.

    Args:
        resume: the command that goes on with it.
        say: shows a line to the user, on standard error.
    """

    def __init__(
        self,
        source: Source,
        rules: Rules,
        backend: Backend,
        settings: Settings,
        resume: str = "",
        say: Callable[[str], None] = lambda text: print(f"slotline: {text}", file=sys.stderr, flush=True),
    ) -> None:
        self._source = source
        self._rules = rules
        self._backend = backend
        self._settings = settings
        self._resume = resume
        self._say = say
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Run every line that has no row yet; returns the exit status.

        Raises:
            BadInput: the input is broken; nothing was run if it could be looked at first.
            Refused: the output is that of something else.
            RunnerLost: there is nothing to run it with.
        """
        with LineIndex() as index, ExitStack() as held:
            reader, limit = LineReader(self._source, self._rules), self._settings.limit
            total, last = survey(reader, index, limit) if self._source.is_file else (None, 0)
            name = self._backend.model_name()
            if isinstance(self._backend, Server) and self._backend.model is not None:
                self._rules = replace(self._rules, model=name)
            run, output, retried = self._claimed(name, index, held)
            done = index.done_count(last)
            if done:
                again = f"; failed lines that run again: {retried}" if retried else ""
                self._say(f"going on with {self._settings.out}: {done} of {total} lines are done{again}")
            if total is not None and done >= total:
                with output:
                    output.complete()
                return ALL_SERVED
            return self._run(run, output, index, done, limit if total is None else total)

    def _claimed(self, model: str, index: LineIndex, held: ExitStack) -> tuple[str, Output, int]:
        """The name of the run, its output, and the number of failed lines of an earlier start."""
        settings = self._settings
        output = Output(settings.out, settings.errors, settings.order, index)
        if settings.out == STDOUT:
            return "stdout", output, 0
        out = Path(settings.out)
        others = [unsorted_path(out), *([settings.errors] if settings.errors else [])]
        manifest = held.enter_context(claim(out, others, self._fingerprint(model), settings.overwrite))
        return manifest.run, output, 0 if manifest.is_new else output.resume()

    def _fingerprint(self, model: str) -> dict[str, Any]:
        rules, errors = self._rules, self._settings.errors
        size, digest = self._source.digest() if self._source.is_file else (0, "")
        return {
            "input": {"bytes": size, "sha256": digest} if self._source.is_file else None,
            "format": self._source.format,
            "model": model,
            "template": rules.template.text if rules.template else None,
            "system": rules.system,
            "chat": rules.chat,
            "options": dict(rules.options),
            "seed": rules.seed,
            "order": self._settings.order,
            "errors": str(errors.resolve()) if errors else None,
        }

    def _run(self, name: str, output: Output, index: LineIndex, done: int, total: int | None) -> int:
        settings = self._settings
        with closing(self._backend.open(self._say)) as runner:
            self._say(f"running with {runner.model} on {runner.where}")
            check_options(runner, self._rules)
            lines = lines_left(
                LineReader(self._source, self._rules), index, settings.limit, surveyed=self._source.is_file
            )
            began = time.monotonic()
            with self._signals(), output, Display(total, done) as display:
                run = Run(
                    lines,
                    runner,
                    output,
                    window=settings.window or LINES_PER_SLOT * runner.slots,
                    limit=settings.max_failures,
                    name=name,
                    watcher=display,
                    interrupted=lambda: self._signal is not None,
                )
                ending = run.run()
                took_s = time.monotonic() - began
                if ending.how == "done":
                    output.complete()
        return self._summary(ending, run.tally, took_s)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C ends the run in order, a second one at once."""

        def on_signal(number: int, frame: object) -> None:
            if self._signal is not None:
                raise KeyboardInterrupt
            self._signal = signal.Signals(number)

        before = [(number, signal.signal(number, on_signal)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _summary(self, ending: Ending, tally: Tally, took_s: float) -> int:
        say = self._say
        took = max(took_s, 1e-3)
        rates = f"{tally.ended / took:.1f} lines/s, {tally.completion_tokens / took:.0f} tokens/s"
        say(f"{tally.ended - tally.failed} of {tally.ended} lines answered in {duration(took_s)} ({rates})")
        if tally.cut:
            were = "answer was" if tally.cut == 1 else "answers were"
            say(f"{tally.cut} {were} cut at the length limit (finish_reason length): see --max-tokens")
        if tally.failed:
            lines = "line" if tally.failed == 1 else "lines"
            say(f"{tally.failed} {lines} failed: {_codes(tally)}; the first, {tally.first_error}")
        if ending.how == "done":
            if tally.failed and self._can_resume:
                say(f"to run the failed lines again: {self._resume}")
            return SOME_FAILED if tally.failed else ALL_SERVED
        say(f"stopped early: {ending.reason}" if ending.how == "stopped" else "interrupted")
        self._say_how_to_resume()
        return INTERRUPTED if self._signal is signal.SIGINT else STOPPED_EARLY

    @property
    def _can_resume(self) -> bool:
        return self._source.is_file and self._settings.out != STDOUT

    def _say_how_to_resume(self) -> None:
        if self._can_resume:
            self._say(f"to go on: {self._resume}")
        elif self._settings.out == STDOUT:
            self._say("what was written to standard output cannot be resumed")
        else:
            self._say("what comes from standard input or a pipe cannot be resumed")


def _codes(tally: Tally) -> str:
    ranked = sorted(tally.codes.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} x {code}" for code, count in ranked[:5])
