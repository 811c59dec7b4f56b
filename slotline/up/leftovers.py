"""Ends what an `up` that was killed left running, and nothing else.

A process is one of ours if the state file names it, with the time of its start, or if it carries our mark in
its environment, as every descendant of a child does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from slotline.home import read_state

#: The variable that marks the children, and theirs: `web@<data directory>`.
MARK = "SLOTLINE_UP"

SIDES = ("web", "batches", "worker")

#: The start time of a process is worked out from the boot time, which moves when the clock is set.
SAME_START_S = 2.0


def mark(name: str, directory: Path) -> str:
    """The mark of one side."""
    return f"{name}@{directory}"


def find_named(named: Any) -> psutil.Process | None:
    """The process that `state.identity` described, if it still runs."""
    try:
        process = psutil.Process(int(named["pid"]))
        return process if abs(process.create_time() - float(named["started"])) < SAME_START_S else None
    except (psutil.Error, KeyError, TypeError, ValueError):
        return None


def find_marked(directory: Path, names: Iterable[str] = SIDES) -> list[psutil.Process]:
    """The processes that carry the mark of one of the sides."""
    marks = [mark(name, directory) for name in names]
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) in marks:
                found.append(process)
    return found


def find_leftovers(directory: Path) -> list[psutil.Process]:
    """Every process of ours of the last `up`, parents before their children."""
    processes = (read_state(directory) or {}).get("processes") or {}
    found = [process for name in SIDES if (process := find_named(processes.get(name)))]
    for process in list(found):
        with suppress(psutil.Error):
            found += process.children(recursive=True)
    return list(dict.fromkeys([*found, *find_marked(directory)]))


def end(processes: list[psutil.Process], wait_s: float = 10.0) -> None:
    """End processes: ask, ask again, which tells a worker to hand its jobs back at once, and then make them."""
    alive = processes
    for _ in range(2):
        for process in alive:
            with suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(alive, timeout=wait_s / 2)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
