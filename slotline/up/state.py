"""The data directory of `slotline up`: who holds it, and what runs from it.

`up.lock` is held by the running `up` and vanishes with it, however it ends. `up.json` says what it started and
stays behind when it was killed, so that the next one can clear up.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from slotline.home import STATE_FILE, read_state

LOCK_FILE = "up.lock"


class ClaimRefused(Exception):
    """The directory cannot be had: another `slotline up` holds it, or it cannot be written. The message says so."""


@contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Hold the data directory.

    Raises:
        ClaimRefused: it cannot be had.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Closed on exec, so that no child keeps the lock after us.
        lock = (directory / LOCK_FILE).open("a+")
    except OSError as error:
        raise ClaimRefused(f"the data directory cannot be used: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ClaimRefused(_holder(lock.read().strip(), directory)) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _holder(pid: str, directory: Path) -> str:
    state = read_state(directory) or {}
    url = f" at {state['url']}" if state.get("url") and str(state.get("pid")) == pid else ""
    return (
        f"`slotline up` is already running{url}: process {pid or 'unknown'} holds {directory}. "
        f"Stop it with Ctrl-C there or `kill {pid}`, or give another --data-dir and --port"
    )


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace the state file; readers see the old or the new one. Only this user may read it."""
    path = directory / STATE_FILE
    draft = path.with_suffix(".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(state, file, indent=2)
    draft.replace(path)


def remove_state(directory: Path) -> None:
    """Say that nothing runs any more."""
    with suppress(FileNotFoundError):
        (directory / STATE_FILE).unlink()


def identity(pid: int) -> dict[str, float]:
    """A process id and when it was started: together they name one process for good."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        started = time.time()
    return {"pid": pid, "started": started}
