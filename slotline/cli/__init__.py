"""The `slotline` command.

Each subcommand lives in a module that is imported when it is named, so that the client commands need only
the client's dependencies and the others can say what to install.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from slotline import __version__
from slotline.cli.faults import expected_errors, lacking


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a subcommand is, as `module:attribute`, what it does, and the extra it needs."""

    target: str
    summary: str
    extra: str | None = None


COMMANDS = {
    "submit": Entry("submit:submit", "Submit a job."),
    "status": Entry("jobs:status", "Show a job, or follow it."),
    "list": Entry("jobs:list_jobs", "List jobs, newest first."),
    "cancel": Entry("jobs:cancel", "Cancel a job."),
    "models": Entry("server:models", "List the models that jobs may name."),
    "stats": Entry("server:stats", "Show the live workers and their slots."),
    "up": Entry("up:up", "Run everything on this machine: Redis, web API, batches, one worker.", "demo"),
    "web": Entry("serve:web", "Run the web API.", "web"),
    "worker": Entry("serve:worker", "Run a worker.", "worker"),
    "batch": Entry("batch:batch", "Run a file of prompts, or hand one to the server.", "demo"),
    "batches": Entry("serve:batches", "Run the batches.", "queue"),
    "bench": Entry("bench:bench", "Measure the engine, a running server, or batches.", "worker"),
    "tune": Entry("tune:tune", "Measure with how many slots a model is served best.", "worker"),
    "version": Entry("server:version", "Show the version."),
}


class Commands(click.Group):
    """A group that imports its commands when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command.

        Raises:
            Fault: the extra it needs is not installed.
        """
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        try:
            found: Any = getattr(import_module(f"slotline.cli.{module}"), attribute)
            command: click.Command = found if isinstance(found, click.Command) else found()
        except ModuleNotFoundError as error:
            raise lacking(cmd_name, entry.extra, error) from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list for `--help` from the table: importing the commands would need every extra."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; whatever may be expected to go wrong ends in one line."""
        with expected_errors(ctx):
            return super().invoke(ctx)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="slotline", message="%(prog)s %(version)s")
def cli() -> None:
    """A task queue whose workers run a language model.

    Commands that talk to a server find it by --url, SLOTLINE_URL, a running `slotline up`, or port 8000 here.
    """
