"""`slotline bench engine`, `sampling`, `serve` and `batch`."""

from __future__ import annotations

from typing import Any

import click

from slotline.cli.faults import BadSetup, Fault
from slotline.cli.show import json_option, print_json, print_table
from slotline.home import default_url

AT_LEAST_1 = click.IntRange(1)


class Batches(click.ParamType[list[int]]):
    """Batch sizes with commas between."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Read `1,8,32`."""
        if isinstance(value, list):
            return value
        try:
            sizes = [int(part) for part in str(value).split(",")]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1 or max(sizes) > 256:
            self.fail(f"{value!r} is not a list such as 1,8,32 of sizes from 1 to 256", param, ctx)
        return sizes


@click.group()
def bench() -> None:
    """Measure the engine, the choice of tokens, a running server, or batches."""


@bench.command()
@click.option("--model", metavar="PATH", help="GGUF file, or fake:echo; left out, the demo model.")
@click.option("--batch", "batches", type=Batches(), default="1,8,32", show_default=True, help="Jobs at once.")
@click.option("--tokens", type=AT_LEAST_1, default=64, show_default=True, help="Tokens of each job.")
@click.option("--rounds", type=AT_LEAST_1, default=5, show_default=True, help="Times each is measured, in turn.")
@click.option("--threads", type=click.IntRange(0), default=0, show_default=True, help="CPU threads; 0: one per core.")
@click.option("--constrained", type=AT_LEAST_1, metavar="N", help="Measure ticks with N jobs under a JSON grammar.")
@json_option
def engine(model: str | None, batches: list[int], constrained: int | None, as_json: bool, **work: int) -> None:
    """Compare the engine with the bare llama_decode loop on the same work, in one process.

    With --constrained N, compare ticks in which N of the jobs keep to a JSON grammar with ticks without one instead.
    """
    if constrained is not None and constrained > min(batches):
        raise click.UsageError("--constrained cannot be more than --batch")
    path = model or demo_model()
    if constrained is None:
        from worker.bench import run

        status = run(path, batches, as_json, **work)
    else:
        from worker.bench_constrained import run as run_constrained

        status = run_constrained(path, batches, constrained, as_json, **work)
    raise click.exceptions.Exit(status)


@bench.command()
@click.option("--rows", type=Batches(), default="32,64", show_default=True, help="Slots that choose a token.")
@click.option("--vocabulary", type=AT_LEAST_1, default=150_000, show_default=True, help="Tokens to choose from.")
@click.option("--rounds", type=AT_LEAST_1, default=50, show_default=True, help="Times each is measured, in turn.")
@json_option
def sampling(rows: list[int], vocabulary: int, rounds: int, as_json: bool) -> None:
    """Compare choosing the tokens of a tick on one thread with doing so on two. It needs no model."""
    from worker.bench_sampling import run

    run(rows, vocabulary, rounds, as_json)


@bench.command()
@click.option("--base-url", "--url", metavar="URL", help="The server. [SLOTLINE_URL; a running `slotline up`]")
@click.option("--concurrency", type=AT_LEAST_1, default=8, show_default=True, help="Jobs at once.")
@click.option("--requests", type=AT_LEAST_1, default=64, show_default=True, help="Jobs in all.")
@click.option("--max-tokens", type=AT_LEAST_1, default=64, show_default=True, help="Tokens of each job.")
@click.option("--prompt-tokens", type=AT_LEAST_1, default=64, show_default=True, help="About so many in each prompt.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--model", help="Model to use; left out, the only or first one.")
@json_option
def serve(base_url: str | None, as_json: bool, **load: Any) -> None:
    """Send jobs to a running server and print throughput, time to first token and time between tokens."""
    import asyncio

    import httpx

    from slotline.load import Load, drive

    url = base_url or default_url()
    try:
        figures = asyncio.run(drive(url, Load(**load))).summary()
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise Fault(f"no server answers at {url}: {error or type(error).__name__}") from None
    if as_json:
        print_json(figures)
    else:
        print_table(("figure", "value"), _rows(figures))
    if figures["failed"] == figures["requests"]:
        raise Fault(f"every job failed: {figures['first_error']}")


@bench.command()
@click.option("--model", metavar="PATH", help="GGUF file, or fake:echo; left out, the demo model.")
@click.option("--lines", type=AT_LEAST_1, default=2000, show_default=True, help="Lines in all.")
@click.option("--rounds", type=AT_LEAST_1, default=4, show_default=True, help="Parts that are measured in turn.")
@click.option("--slots", type=click.IntRange(1, 256), default=16, show_default=True, help="Lines that run at once.")
@click.option("--prompt-tokens", type=AT_LEAST_1, default=30, show_default=True, help="About so many in each prompt.")
@click.option("--max-tokens", type=AT_LEAST_1, default=32, show_default=True, help="New tokens of each line.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@json_option
def batch(model: str | None, as_json: bool, **work: Any) -> None:
    """Compare a batch run with the engine alone on the same requests: rows on disk against tokens in memory."""
    from slotline.batch.bench import Work, compare
    from slotline.batch.runner import RunnerLost
    from worker.backend import ModelError

    if work["lines"] < work["rounds"]:
        raise click.UsageError("--lines has to be at least --rounds")
    try:
        path = model or demo_model()
        figures = compare(path, Work(**work), lambda text: click.echo(f"slotline: {text}", err=True)).as_dict()
    except (RunnerLost, ModelError) as error:
        raise BadSetup(str(error)) from None
    if as_json:
        print_json(figures)
    else:
        print_table(("figure", "value"), list(figures.items()))


def demo_model() -> str:
    """Path of the demo model, which is made on first use.

    Raises:
        BadSetup: it cannot be had.
    """
    from worker.backend import ModelError
    from worker.demo import demo_model_path

    try:
        return str(demo_model_path())
    except ModelError as error:
        raise BadSetup(str(error)) from None


def _rows(figures: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            rows += [(f"{name} {percentile}", number) for percentile, number in value.items()]
        elif value is not None:
            rows.append((name, value))
    return rows
