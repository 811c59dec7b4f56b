"""`slotline batch submit`, `status`, `cancel`, `pause`, `resume`, `retry` and `download`: the server's batches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click

from slotline.cli.batch_run import FORMATS, check_places, expected, make_rules
from slotline.cli.faults import Fault
from slotline.cli.generation import answer_options
from slotline.cli.show import json_option, print_json, print_table, url_option, when
from slotline.client import Client

ENDED = ("completed", "failed", "expired", "cancelled")

#: How often `--wait` asks, and says how far it is.
ASK_S, SAY_S = 1.0, 30.0

ID = click.argument("batch_id", metavar="ID")


@click.command()
@click.argument("source", metavar="FILE")
@click.option("--endpoint", help="What the lines ask for. They say so themselves; another one is refused.")
@click.option("--format", "given_format", type=click.Choice(FORMATS), help="How FILE is read; left out, by its name.")
@click.option("--template", metavar="TEXT", help="Prompt with {column} of each line; a literal brace is doubled.")
@click.option("--system", metavar="TEXT", help="What the model is told first; makes prompts a conversation.")
@click.option("--chat", is_flag=True, help="Send prompts as a user's message, through the model's chat template.")
@click.option("--schema", metavar="FILE", type=click.Path(path_type=Path), help="JSON schema of every answer.")
@click.option("--model", help="Model for every line.")
@click.option("--seed", type=click.IntRange(-1), default=0, show_default=True, help="Each line draws by (seed, line).")
@answer_options
@click.option("--window", default="7d", show_default=True, help="What has not run by then expires, as in 24h or 7d.")
@click.option("--max-lines", type=click.IntRange(1), default=50_000, show_default=True, help="Lines of one batch.")
@click.option("--max-bytes", type=click.IntRange(1), default=200 * 1024 * 1024, show_default=True, help="Its size.")
@click.option("--wait", is_flag=True, help="Wait for the end; exits with 1 if lines failed.")
@url_option
@json_option
def submit(
    source: str,
    endpoint: str | None,
    given_format: Any,
    template: str | None,
    system: str | None,
    chat: bool,
    schema: Path | None,
    model: str | None,
    seed: int,
    window: str,
    max_lines: int,
    max_bytes: int,
    wait: bool,
    url: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Upload FILE and start a batch over it, or several if it exceeds the limits; prints their ids.

    FILE is read as `slotline batch run` reads it. A plain line becomes an OpenAI line with the custom_id line-NUMBER.
    """
    from dataclasses import replace

    from slotline.batch.index import LineIndex
    from slotline.batch.lines import LineReader
    from slotline.batch.problems import BadInput, Problem
    from slotline.batch.reading import open_source
    from slotline.batch.splitting import pieces
    from slotline.batch.survey import survey

    made: list[dict[str, Any]] = []
    with expected(), Client(url) as client:
        found = open_source(source, given_format)
        if not found.is_file:
            raise BadInput([Problem(None, "batch submit reads the input twice: give it a file")])
        rules = replace(make_rules(template, system, chat, seed, options, schema), model=model)
        with LineIndex() as index:
            survey(LineReader(found, rules), index)
        for number, piece in enumerate(pieces(LineReader(found, rules), max_lines, max_bytes), 1):
            if endpoint is not None and piece.endpoint != endpoint:
                raise BadInput([Problem(piece.first, f"is for {piece.endpoint}, not for --endpoint {endpoint}")])
            name = f"{Path(source).name}.{number}.jsonl"
            file = client.files.upload(piece.path, name)
            batch = client.batches.create(file["id"], piece.endpoint, window, {"source": Path(source).name[:512]})
            made.append(batch)
            # At once, so that none is lost when a later one, or the wait, comes to grief.
            click.echo(batch["id"], err=as_json or wait)
        if wait:
            made = [_waited(client, batch["id"]) for batch in made]
            _show_all(made, as_json)
        elif as_json:
            for batch in made:
                print_json(batch)
    if wait:
        _check_served(made)


@click.command()
@ID
@click.option("--wait", is_flag=True, help="Wait for the end; exits with 1 if lines failed.")
@url_option
@json_option
def status(batch_id: str, wait: bool, url: str | None, as_json: bool) -> None:
    """Show how far a batch has come."""
    with Client(url) as client:
        batch = _waited(client, batch_id) if wait else client.batches.info(batch_id)
        _show(batch, as_json)
    if wait:
        _check_served([batch])


def action(name: str, summary: str) -> click.Command:
    """A command that does one thing with a batch and shows it."""

    def run(batch_id: str, url: str | None, as_json: bool) -> None:
        with Client(url) as client:
            _show(getattr(client.batches, name)(batch_id), as_json)

    return click.command(name, help=summary)(ID(url_option(json_option(run))))


@click.command()
@ID
@click.option("-o", "--output", "out", metavar="OUT", required=True, help="File for the rows, or - for stdout.")
@click.option("--errors", type=click.Path(path_type=Path, dir_okay=False), help="Rows of failed lines go here instead.")
@url_option
def download(batch_id: str, out: str, errors: Path | None, url: str | None) -> None:
    """Fetch the rows of a batch, also while it runs: those that are there by then."""
    check_places(out, errors)
    with expected(), Client(url) as client:
        batch = client.batches.info(batch_id)
        if batch["status"] not in ENDED:
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            click.echo(f"slotline: {batch_id} is {batch['status']}: {done} of {counts['total']} lines so far", err=True)
        with _written(out) as rows:
            _copy(client, batch["output_file_id"], rows)
            if errors is None:
                _copy(client, batch["error_file_id"], rows)
        if errors is not None:
            with _written(str(errors)) as rows:
                _copy(client, batch["error_file_id"], rows)


@contextmanager
def _written(out: str) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is whole."""
    if out == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    draft = Path(f"{out}.new")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)


def _copy(client: Client, file_id: str | None, rows: IO[bytes]) -> None:
    for piece in client.files.content(file_id) if file_id else ():
        rows.write(piece)


def _waited(client: Client, batch_id: str) -> dict[str, Any]:
    said_at = time.monotonic()
    while True:
        batch = client.batches.info(batch_id)
        if batch["status"] in ENDED:
            return batch
        if time.monotonic() - said_at >= SAY_S:
            said_at = time.monotonic()
            click.echo(f"slotline: {batch_id}: {_progress(batch)}", err=True)
        time.sleep(ASK_S)


def _check_served(batches: list[dict[str, Any]]) -> None:
    if any(batch["status"] != "completed" or batch["request_counts"]["failed"] for batch in batches):
        raise Fault("not every line was served: see `slotline batch download`")


def _show(batch: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(batch)
        return
    fields = {
        "id": batch["id"],
        "status": batch["status"] + (" (paused)" if batch.get("paused") else ""),
        "lines": _progress(batch),
        "endpoint": batch["endpoint"],
        "model": batch.get("model"),
        "created": when(batch["created_at"]),
        "expires": when(batch.get("expires_at")),
        "output file": batch.get("output_file_id"),
        "error file": batch.get("error_file_id"),
    }
    print_table(("field", "value"), [(name, value) for name, value in fields.items() if value is not None])
    _show_errors(batch)


def _show_errors(batch: dict[str, Any]) -> None:
    """Why it failed as a whole."""
    for error in (batch.get("errors") or {}).get("data") or []:
        place = f"line {error['line']}: " if error.get("line") else ""
        click.echo(f"slotline: {place}{error['message']} ({error['code']})", err=True)


def _show_all(batches: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for batch in batches:
            print_json(batch)
    else:
        print_table(("batch", "status", "lines"), [(b["id"], b["status"], _progress(b)) for b in batches])
    for batch in batches:
        _show_errors(batch)


def _progress(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    return f"{counts['completed']} answered and {counts['failed']} failed of {counts['total']}"
