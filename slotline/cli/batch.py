"""`slotline batch`: run a file of prompts here, or hand one to the server."""

from __future__ import annotations

import click

from slotline.cli import batch_server
from slotline.cli.batch_run import run


@click.group()
def batch() -> None:
    """Run a file of prompts, or hand one to the server."""


for command in (
    run,
    batch_server.submit,
    batch_server.status,
    batch_server.action("cancel", "End a batch; what has run keeps its row."),
    batch_server.action("pause", "Start no more lines of a batch until it is resumed."),
    batch_server.action("resume", "Go on with a paused batch."),
    batch_server.action("retry", "Run the failed lines of an ended batch again."),
    batch_server.download,
):
    batch.add_command(command)


@batch.command(hidden=True)
def keep() -> None:
    """How `run` starts what it needs: Valkey and a worker that end with it."""
    from slotline.up.keeper import keep as keep_processes

    raise click.exceptions.Exit(keep_processes())
