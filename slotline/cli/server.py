"""`slotline models`, `stats` and `version`."""

from __future__ import annotations

import platform

import click

from slotline import __version__
from slotline.cli.show import json_option, print_json, print_table, url_option
from slotline.client import Client

WORKER_COLUMNS = ("worker", "model", "active_slots", "prefilling_slots", "idle_slots", "queue_depth", "last_tick_age_s")


@click.command()
@url_option
@json_option
def models(url: str | None, as_json: bool) -> None:
    """List the models that jobs may name."""
    with Client(url) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    names = ("id", "n_ctx", "max_request_tokens", "description")
    print_table(names, ([model.get(name) for name in names] for model in found))


@click.command()
@url_option
@json_option
def stats(url: str | None, as_json: bool) -> None:
    """Show the live workers and their slots."""
    with Client(url) as client:
        found = client.stats()
    if as_json:
        print_json(found)
        return
    workers = found.get("workers", [])
    print_table(
        [name.replace("_", " ") for name in WORKER_COLUMNS], ([w.get(n) for n in WORKER_COLUMNS] for w in workers)
    )
    if not workers:
        click.echo("no worker is up", err=True)


@click.command()
def version() -> None:
    """Show the version."""
    click.echo(f"slotline {__version__} (Python {platform.python_version()})")
