"""`slotline status`, `list` and `cancel`."""

from __future__ import annotations

import click

from slotline.cli.show import (
    json_option,
    print_job,
    print_json,
    print_stream,
    print_table,
    url_option,
    waited_for,
    when,
)
from slotline.client import Client


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("--stream", is_flag=True, help="Print its tokens from the start, as they come.")
@click.option("--wait", is_flag=True, help="Wait for its end first.")
@click.option("--token-timeout", type=float, default=30, show_default=True, help="With --stream: seconds per token.")
@url_option
@json_option
def status(job_id: str, stream: bool, wait: bool, token_timeout: float, url: str | None, as_json: bool) -> None:
    """Show a job, or follow it."""
    with Client(url) as client:
        job = client.job(job_id)
        if stream:
            waited_for(job, lambda: print_stream(job, token_timeout, as_json))
            return
        shown = waited_for(job, lambda: job.result().job) if wait else job.info()
    print_json(shown) if as_json else print_job(shown)


@click.command("list")
@click.option(
    "--status",
    type=click.Choice(["queued", "running", "completed", "failed", "cancelled"]),
    help="Only jobs in this state.",
)
@click.option("--model", help="Only jobs of this model.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="How many.")
@click.option("--after", metavar="ID", help="Only jobs older than this one.")
@url_option
@json_option
def list_jobs(
    status: str | None, model: str | None, limit: int, after: str | None, url: str | None, as_json: bool
) -> None:
    """List jobs, newest first."""
    with Client(url) as client:
        page = client.jobs(status=status, model=model, limit=limit, after=after)
    if as_json:
        print_json(page)
        return
    columns = ("id", "status", "model", "priority", "created", "finish")
    names = ("id", "status", "model", "priority", "created_at", "finish_reason")
    print_table(columns, ([when(job[n]) if n == "created_at" else job[n] for n in names] for job in page["data"]))
    if page.get("has_more"):
        click.echo(f"more with --after {page.get('next') or page['data'][-1]['id']}", err=True)


@click.command()
@click.argument("job_id", metavar="ID")
@url_option
@json_option
def cancel(job_id: str, url: str | None, as_json: bool) -> None:
    """Cancel a job."""
    with Client(url) as client:
        job = client.job(job_id).cancel()
    print_json(job) if as_json else click.echo(f"{job_id} {job['status']}")
