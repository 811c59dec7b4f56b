"""`slotline web`, `slotline worker` and `slotline batches`: one process each, with a flag for every setting."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import click

from slotline.cli.faults import BadSetup, Fault, NoRedis
from slotline.cli.flags import settings_options
from slotline.home import running_state

if TYPE_CHECKING:
    from shared.settings import BatchSettings, S, WorkerSettings

#: An engine that has not moved for so long is stuck: a tick takes seconds at most, and idle ones count.
STALLED_S = 60.0


def web() -> click.Command:
    """The command `slotline web`."""
    from shared.settings import WebSettings

    def run(**given: Any) -> None:
        """Run the web API."""
        settings = load_settings(WebSettings, given)
        from webapi.server import run as serve

        _leave(serve(settings))

    return click.Command("web", callback=run, params=[*settings_options(WebSettings)], help=run.__doc__)


def worker() -> click.Command:
    """The command `slotline worker`."""
    from shared.settings import WorkerSettings

    def run(check: bool, model_process_of: int | None, black_box: int | None, **given: Any) -> None:
        """Run a worker: a small parent that keeps the process with the model going."""
        settings = load_settings(WorkerSettings, given)
        if check:
            _check(settings)
        elif model_process_of is not None:
            from worker.black_box import BlackBox
            from worker.model_process import run as run_model

            _leave(run_model(settings, model_process_of, BlackBox(black_box)))
        else:
            from worker.main import run as run_parent

            _leave(run_parent(settings))

    flags = [
        click.Option(["--check"], is_flag=True, help="Start nothing; say whether this host's worker is well (0 or 1)."),
        # How the parent starts the other process: its own process id, and a file descriptor that both have.
        click.Option(["--model-process-of"], type=int, hidden=True),
        click.Option(["--black-box"], type=int, hidden=True),
    ]
    return click.Command("worker", callback=run, params=[*flags, *settings_options(WorkerSettings)], help=run.__doc__)


def batches() -> click.Command:
    """The command `slotline batches`."""
    from shared.settings import BatchSettings

    def run(check: bool, **given: Any) -> None:
        """Run batches: feed their lines to the workers, and write the results."""
        settings = load_settings(BatchSettings, given)
        if check:
            _check_batches(settings)
        else:
            from shared.batches.process import run as run_batches

            _leave(run_batches(settings))

    flag = click.Option(["--check"], is_flag=True, help="Start nothing; say whether this host's process is well.")
    return click.Command("batches", callback=run, params=[flag, *settings_options(BatchSettings)], help=run.__doc__)


def load_settings(cls: type[S], given: dict[str, Any]) -> S:
    """Settings from flags and variables. Without a Redis of its own, that of a running `slotline up`, and its files.

    Raises:
        BadSetup: a line for each bad value.
    """
    from shared.settings import SettingsError, load

    try:
        settings = load(cls, given)
        state = running_state()
        if state is None or "redis_url" in settings.model_fields_set or not state.get("redis_url"):
            return settings
        click.echo("slotline: using the Redis of the running `slotline up`", err=True)
        found = {"redis_url": state["redis_url"]}
        if "files_url" not in settings.model_fields_set:
            found["files_url"] = state.get("files_url")
        return load(cls, given | found)
    except SettingsError as error:
        raise BadSetup(str(error)) from None


def _check(settings: WorkerSettings) -> None:
    """For health checks: a worker puts its host in its name, and its figures vanish seconds after it."""
    from redis.exceptions import RedisError

    from shared.connection import connect
    from shared.registry import Registry

    client = connect(settings)
    try:
        found = [stats for stats in Registry(client).workers() if f"-{socket.gethostname()}-" in stats.worker]
    except RedisError as error:
        raise NoRedis(f"Redis cannot be asked: {error}") from None
    finally:
        client.close()
    if not found:
        raise Fault("no worker of this host is up")
    age_s = max(stats.last_tick_age_s for stats in found)
    if age_s > STALLED_S:
        raise Fault(f"a worker of this host has not moved for {age_s:.0f} s")
    click.echo(f"{', '.join(stats.worker for stats in found)}: well")


def _check_batches(settings: BatchSettings) -> None:
    from redis.exceptions import RedisError

    from shared.batches.process import check

    try:
        found = check(settings)
    except RedisError as error:
        raise NoRedis(f"Redis cannot be asked: {error}") from None
    if not found:
        raise Fault("no process of this host runs batches")
    click.echo(f"{', '.join(found)}: well")


def _leave(status: int | None) -> None:
    raise click.exceptions.Exit(status or 0)
