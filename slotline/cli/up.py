"""`slotline up`."""

from __future__ import annotations

from pathlib import Path

import click

from slotline.cli.faults import Fault


@click.command()
@click.option("--host", metavar="TEXT", help="Address to listen on. [SLOTLINE_HOST; 127.0.0.1]")
@click.option("--port", metavar="N", help="Port to listen on; 0 means any free one. [SLOTLINE_PORT; 8000]")
@click.option("--model", metavar="PATH", help="GGUF file, or fake:echo. [SLOTLINE_MODEL_PATH; the demo model]")
@click.option("--slots", metavar="N", help="Jobs that generate at once, or auto. [SLOTLINE_N_PARALLEL; auto]")
@click.option("--redis-url", metavar="URL", help="Use this Redis instead of one of our own. [SLOTLINE_REDIS_URL]")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where data is kept. [SLOTLINE_DATA_DIR]")
@click.option("--fresh", is_flag=True, help="Empty the data first.")
def up(
    host: str | None,
    port: str | None,
    model: str | None,
    slots: str | None,
    redis_url: str | None,
    data_dir: Path | None,
    fresh: bool,
) -> None:
    """Run everything on this machine: Valkey with its data on disk, the web API, the batches, and one worker.

    Every other setting of `slotline web`, `batches` and `worker` is taken from its SLOTLINE_… variable.
    Ctrl-C stops it all in order; jobs that are left go on next time.
    """
    from slotline.up.plan import make_plan
    from slotline.up.state import ClaimRefused, claim
    from slotline.up.supervisor import Up
    from slotline.up.terminal import Terminal

    plan = make_plan(host, port, model, slots, redis_url, data_dir, fresh)
    try:
        with claim(plan.directory):
            status = Up(plan, Terminal()).run()
    except ClaimRefused as error:
        raise Fault(str(error)) from None
    raise click.exceptions.Exit(status)
