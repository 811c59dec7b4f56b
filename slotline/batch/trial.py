"""`--dry-run`: checks every line, counts tokens, and estimates the time from a few lines that are really run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice

import click

from slotline.batch.backends import Backend, Server
from slotline.batch.index import LineIndex
from slotline.batch.lines import Line, LineReader, Rules
from slotline.batch.problems import SHOWN, BadInput, Problem
from slotline.batch.progress import duration
from slotline.batch.reading import Source
from slotline.batch.runner import LINES_PER_SLOT, Runner
from slotline.batch.running import Tally
from slotline.batch.survey import survey

#: Tokens are counted of so many lines at most, evenly spread, and reckoned up to all.
COUNTED = 1000

#: Lines that are run for each slot, evenly spread, and at least.
RUN_PER_SLOT, RUN_AT_LEAST = 2, 8


def dry_run(source: Source, rules: Rules, backend: Backend, limit: int | None, window: int | None) -> int:
    """Print what a run would be; returns 1 if lines could not be served, else 0.

    Raises:
        BadInput: the input is broken, or cannot be read twice.
        RunnerLost: there is nothing to try it with.
    """
    if not source.is_file:
        raise BadInput([Problem(None, "--dry-run reads the input more than once: give it a file")])
    with LineIndex() as index:
        total, _ = survey(LineReader(source, rules), index, limit)
    name = backend.model_name()
    if isinstance(backend, Server) and backend.model is not None:
        rules = replace(rules, model=name)

    def lines() -> Iterator[Line]:
        return (line for line in islice(LineReader(source, rules), total) if isinstance(line, Line))

    refused = _check(lines())
    with closing(backend.open(lambda text: click.echo(f"slotline: {text}", err=True))) as runner:
        click.echo(f"lines          {total}, of which {refused} cannot be served")
        click.echo(f"model          {runner.model} on {runner.where}")
        click.echo(f"prompt tokens  {_count_tokens(lines, total, runner)}")
        tally, took_s = _try(spread(lines(), total, max(RUN_AT_LEAST, RUN_PER_SLOT * runner.slots)), runner, window)
    _print_estimate(tally, took_s, total)
    return 1 if refused or tally.failed else 0


def spread(lines: Iterator[Line], total: int, count: int) -> Iterator[Line]:
    """At most `count` of `total` lines, evenly spread."""
    chosen = min(count, total)
    for place, line in enumerate(lines):
        if place * chosen // total != (place + 1) * chosen // total:
            yield line


def _check(lines: Iterator[Line]) -> int:
    """Check the requests as the server will, where its part is installed here; returns how many cannot be served."""
    try:
        import shared.openai.exchange  # noqa: F401 - only to see whether it is there
    except ModuleNotFoundError:
        click.echo("slotline: requests are checked by the server alone: pip install 'slotline[queue]'", err=True)
        return 0
    from slotline.batch.embedded import check_line

    refused = 0
    for line in lines:
        error = check_line(line)
        if error is not None:
            refused += 1
            if refused <= SHOWN:
                click.echo(f"slotline: line {line.number}: {error.message}", err=True)
    return refused


def _count_tokens(lines: Callable[[], Iterator[Line]], total: int, runner: Runner) -> str:
    counts = [runner.count_tokens(line.prompt_text) for line in spread(lines(), total, COUNTED)]
    mean = sum(counts) / len(counts)
    if len(counts) == total:
        return f"{sum(counts)} ({mean:.0f} a line, at most {max(counts)})"
    return f"about {mean * total:.0f} ({mean:.0f} a line, at most {max(counts)} among {len(counts)} that were counted)"


def _try(lines: Iterator[Line], runner: Runner, window: int | None) -> tuple[Tally, float]:
    """Run lines and throw the answers away."""
    tally, under_way, left = Tally(), 0, list(lines)
    began = time.monotonic()
    while left or under_way:
        while left and under_way < (window or LINES_PER_SLOT * runner.slots):
            runner.start(left.pop(0))
            under_way += 1
        for outcome in runner.ended(0.5):
            tally.add(outcome)
            under_way -= 1
    return tally, time.monotonic() - began


def _print_estimate(tally: Tally, took_s: float, total: int) -> None:
    rate = tally.ended / max(took_s, 1e-3)
    new = tally.completion_tokens / max(tally.ended - tally.failed, 1)
    click.echo(f"new tokens     about {new * total:.0f} ({new:.0f} a line), cut at the limit: {tally.cut}")
    click.echo(f"sample         {tally.ended} lines in {took_s:.1f} s ({rate:.1f} lines/s), {tally.failed} failed")
    if tally.first_error:
        click.echo(f"first failure  {tally.first_error}")
    click.echo(f"time           about {duration(total / rate)}")
