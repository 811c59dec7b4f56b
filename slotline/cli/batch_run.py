"""`slotline batch run`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slotline.cli.faults import BadSetup, Fault
from slotline.cli.generation import answer_options, job_body

if TYPE_CHECKING:
    from slotline.batch.failures import FailureLimit
    from slotline.batch.lines import Rules

AUTO = "auto"
FORMATS = ["jsonl", "csv", "tsv", "parquet"]


class MaxFailures(click.ParamType["FailureLimit"]):
    """`N` or `P%`."""

    name = "N|P%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FailureLimit:
        """Read it."""
        from slotline.batch.failures import FailureLimit

        if isinstance(value, FailureLimit):
            return value
        try:
            return FailureLimit.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Slots(click.ParamType[int | str]):
    """`N` or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Read it."""
        if value == AUTO:
            return AUTO
        return int(click.IntRange(1, 256).convert(value, param, ctx))


@click.command()
@click.argument("source", metavar="IN")
@click.option("-o", "--output", "out", metavar="OUT", required=True, help="JSONL file for the rows, or - for stdout.")
@click.option("--format", "given_format", type=click.Choice(FORMATS), help="How IN is read; left out, by its name.")
@click.option("--template", metavar="TEXT", help="Prompt with {column} of each line; a literal brace is doubled.")
@click.option("--system", metavar="TEXT", help="What the model is told first; makes prompts a conversation.")
@click.option("--chat", is_flag=True, help="Send prompts as a user's message, through the model's chat template.")
@click.option("--schema", metavar="FILE", type=click.Path(path_type=Path), help="JSON schema of every answer.")
@click.option("--model", metavar="NAME|PATH", help="A model of the server, for every line; or a file to run here.")
@click.option("--seed", type=click.IntRange(-1), default=0, show_default=True, help="Each line draws by (seed, line).")
@answer_options
@click.option("--base-url", "--url", "base_url", metavar="URL", help="The server. [SLOTLINE_URL; a running `up`]")
@click.option("--slots", type=Slots(), help="Start a worker here, with so many slots; auto: as many as are of use.")
@click.option("--concurrency", type=click.IntRange(1), help="Lines under way at once; left out, 4 for each slot.")
@click.option("--order", type=click.Choice(["finished", "input"]), default="finished", show_default=True)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N lines.")
@click.option("--errors", type=click.Path(path_type=Path, dir_okay=False), help="Rows of failed lines go here instead.")
@click.option(
    "--max-failures",
    type=MaxFailures(),
    help="Stop when more lines have failed. Left out, when the first 50 all have.",
)
@click.option("--overwrite", is_flag=True, help="Throw away what OUT holds.")
@click.option("--dry-run", is_flag=True, help="Check all lines, count tokens and estimate the time; write nothing.")
def run(
    source: str,
    out: str,
    given_format: Any,
    template: str | None,
    system: str | None,
    chat: bool,
    schema: Path | None,
    model: str | None,
    seed: int,
    base_url: str | None,
    slots: int | str | None,
    concurrency: int | None,
    order: Any,
    limit: int | None,
    errors: Path | None,
    max_failures: FailureLimit | None,
    overwrite: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Run every line of IN and write a row for each to OUT.

    IN is JSONL (OpenAI batch lines, or objects with `prompt` or `messages`), CSV, TSV or Parquet, also .gz, or - for
    standard input. The same command again goes on where it stopped. It runs on --base-url, else a running
    `slotline up`, else a worker of its own.

    Exits with 0 if all lines were served, 1 if some failed, 2 if usage or input are bad, 3 if it stopped early and
    130 after Ctrl-C.
    """
    from slotline.program import again

    resume = again(without=("--overwrite",))
    with expected(resume if "-" not in (source, out) else None):
        # Within: these take a moment to import, in which Ctrl-C is answered as later on.
        from slotline.batch.backends import choose
        from slotline.batch.failures import FailureLimit
        from slotline.batch.reading import open_source
        from slotline.batch.session import Session, Settings

        _check_paths(source, out, errors)
        if Path(out).is_symlink():
            # Files that take the place of another would take that of the link.
            out = str(Path(out).resolve())
        settings = Settings(
            out, errors, order, limit, max_failures or FailureLimit(), overwrite=overwrite, window=concurrency
        )
        rules = make_rules(template, system, chat, seed, options, schema)
        backend = choose(base_url, model, slots)
        found = open_source(source, given_format)
        if dry_run:
            from slotline.batch.trial import dry_run as try_out

            status = try_out(found, rules, backend, limit, concurrency)
        else:
            status = Session(found, rules, backend, settings, resume).run()
    raise click.exceptions.Exit(status)


@contextmanager
def expected(resume: str | None = None) -> Iterator[None]:
    """Turn what may be expected to go wrong into a message and an exit status."""
    from slotline.batch.manifest import Refused
    from slotline.batch.problems import BadInput
    from slotline.batch.runner import RunnerLost
    from slotline.batch.template import BadTemplate

    try:
        yield
    except (BadInput, BadTemplate, Refused, RunnerLost) as error:
        raise BadSetup(str(error)) from None
    except BrokenPipeError:
        raise StoppedEarly("stopped early: nobody reads the output any more") from None
    except OSError as error:
        told = f"the output cannot be written: {error}"
        raise StoppedEarly(told if resume is None else f"{told}\nto go on: {resume}") from None
    except KeyboardInterrupt:
        if resume is not None:
            click.echo(f"slotline: interrupted; to go on: {resume}", err=True)
        raise


class StoppedEarly(Fault):
    """Not every line has its row."""

    exit_code = 3


def make_rules(
    template: str | None, system: str | None, chat: bool, seed: int, options: dict[str, Any], schema: Path | None
) -> Rules:
    """The rules for lines from the flags of a command."""
    from slotline.batch.lines import Rules
    from slotline.batch.template import Template

    body = job_body(options)
    if schema is not None:
        if "grammar" in body:
            raise click.UsageError("give --schema or --grammar, not both")
        named = {"name": schema.stem[:64], "schema": _schema(schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return Rules(Template(template) if template is not None else None, system, chat, body, None, seed)


def _schema(path: Path) -> Any:
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--schema") from None
    if not isinstance(schema, dict | bool):
        raise click.BadParameter(f"{path} does not hold a JSON schema, which is an object", param_hint="--schema")
    return schema


#: Rows are lines of JSON, so a name that promises something else is a mistake.
OTHER_ENDINGS = (".gz", ".csv", ".tsv", ".parquet")


def _check_paths(source: str, out: str, errors: Path | None) -> None:
    if out.endswith(OTHER_ENDINGS):
        raise click.UsageError(f"rows are written as JSONL: {out!r} ends like something else")
    check_places(out, errors)
    _check_distinct(source, out, errors)


def check_places(out: str, errors: Path | None) -> None:
    """Refuse outputs that are not, and cannot become, two plain files, before anything is done for them.

    Raises:
        click.UsageError: names the flag.
    """
    written = ([("-o", Path(out))] if out != "-" else []) + ([("--errors", errors)] if errors else [])
    for flag, path in written:
        _check_place(flag, path)
    if len({path.resolve() for _, path in written}) < len(written):
        raise click.UsageError("-o and --errors have to be different files")


def _check_place(flag: str, path: Path) -> None:
    if str(path) == "-":
        wrong = "has to be a file"
    elif path.is_dir():
        wrong = "is a folder"
    elif path.exists() and not path.is_file():
        wrong = "is not a plain file; `-o -` writes to standard output"
    elif not path.resolve().parent.is_dir():
        wrong = "its folder does not exist"
    else:
        return
    raise click.UsageError(f"{flag} {path}: {wrong}")


def _check_distinct(source: str, out: str, errors: Path | None) -> None:
    """What is kept beside an output is written, too."""
    from slotline.batch.manifest import manifest_path
    from slotline.batch.writing import draft_path, unsorted_path

    ours = [Path(out), *(beside(Path(out)) for beside in (manifest_path, unsorted_path, draft_path))]
    given = [*([Path(source)] if source != "-" else []), *([errors] if errors else [])]
    real = [path.resolve() for path in [*(ours if out != "-" else []), *given]]
    if len(set(real)) < len(real):
        raise click.UsageError("IN, OUT (with the files beside it) and --errors have to be different files")
