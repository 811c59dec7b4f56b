"""`slotline submit`."""

from __future__ import annotations

import sys
from typing import Any

import click

from slotline.cli.generation import job_body, job_options, token_ids
from slotline.cli.show import json_option, print_json, print_stream, printable, url_option, waited_for
from slotline.client import Client
from slotline.job import Job


@click.command()
@click.argument("prompt", required=False)
@click.option("--tokens", metavar="IDS", help="Token ids instead of a text, as in 1,2,3.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: what the model is told first.")
@click.option("--stream", is_flag=True, help="Print the tokens as they come.")
@click.option("--wait", is_flag=True, help="Wait for the end and print the text.")
@click.option("--token-timeout", type=float, default=30, show_default=True, help="With --stream: seconds per token.")
@job_options
@url_option
@json_option
def submit(
    prompt: str | None,
    tokens: str | None,
    chat: bool,
    system: str | None,
    stream: bool,
    wait: bool,
    token_timeout: float,
    url: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit a job and print its id. PROMPT may be - for standard input."""
    if stream and wait:
        raise click.UsageError("give --stream or --wait, not both")
    body = job_body(options) | _prompt(prompt, tokens, chat, system) | ({"stream": True} if stream else {})
    with Client(url) as client:
        try:
            job = client.submit(**body)
        except ValueError as error:  # NaN, or text that was not UTF-8
            raise click.UsageError(f"this cannot be sent as JSON: {error}") from None
        if stream:
            waited_for(job, lambda: print_stream(job, token_timeout, as_json))
        elif wait:
            waited_for(job, lambda: _print_result(job, as_json))
        elif as_json:
            print_json(job.info())
        else:
            click.echo(job.id)


def _print_result(job: Job, as_json: bool) -> None:
    result = job.result()
    if as_json:
        print_json(result.job)
    else:
        click.echo(printable(result.text))


def _prompt(prompt: str | None, tokens: str | None, chat: bool, system: str | None) -> dict[str, Any]:
    if (prompt is None) == (tokens is None):
        raise click.UsageError("give a prompt, or token ids with --tokens")
    if tokens is not None and chat:
        raise click.UsageError("--chat needs a text, not --tokens")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if tokens is not None:
        return {"prompt": token_ids(tokens)}
    text = sys.stdin.read() if prompt == "-" else prompt
    if not chat:
        return {"prompt": text}
    turns = [("system", system), ("user", text)]
    return {"messages": [{"role": role, "content": content} for role, content in turns if content is not None]}
