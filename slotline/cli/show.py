"""How results look: JSON for programs, tables for a terminal, tab-separated lines for a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from slotline.cli.faults import how_to_go_on
from slotline.job import Job

url_option = click.option("--url", metavar="URL", help="The server. [SLOTLINE_URL; a running `slotline up`]")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(json.dumps(value))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; in a pipe, one line for each row with tabs between, and no heading."""
    lines = [[_cell(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for line in lines:
            click.echo("\t".join(line))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=SIMPLE_HEAD)
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)


def print_job(job: dict[str, Any]) -> None:
    """A job's fields, one on a line, and its text below."""
    shown = {
        name: value for name, value in job.items() if value is not None and name not in ("text", "links", "object")
    }
    shown.update({name: when(value) for name, value in shown.items() if name.endswith("_at")})
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        click.echo(f"{name:{width}}  {_cell(value)}")
    if job.get("text"):
        click.echo("")
        click.echo(printable(job["text"]))


def print_stream(job: Job, timeout_s: float, as_json: bool) -> None:
    """A job's tokens as they come; as JSON, one object for each and the job at the end."""
    with job.stream(timeout_s) as tokens:
        try:
            for token in tokens:
                if as_json:
                    print_json({"index": token.index, "text": token.text, "token": token.token})
                else:
                    click.echo(printable(token.text), nl=False)
        finally:
            if not as_json:
                click.echo("")
    if as_json and tokens.result is not None:
        print_json(tokens.result.job)


def waited_for(job: Job, wait: Callable[[], Any]) -> Any:
    """Do the waiting; if the user ends it, say that the job goes on."""
    try:
        return wait()
    except KeyboardInterrupt:
        click.echo(f"slotline: job {job.id} goes on: {how_to_go_on(job.id)}", err=True)
        raise


def when(seconds: float | None) -> str:
    """A moment in local time."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def printable(text: str) -> str:
    """What a model wrote, unable to command the terminal it is shown on."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _cell(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else "" if value is None else str(value)
    return " ".join(printable(text).split())
