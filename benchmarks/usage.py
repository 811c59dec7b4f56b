"""CPU time of a server by process and thread, read from the kernel (Linux)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import psutil

#: Seconds of one unit in `schedstat`.
NS = 1e-9


def cpu_by_part(pid: int) -> dict[str, float]:
    """CPU seconds so far of a process and its descendants, by part: `web`, `worker/publisher`, …

    A part is a process, of the model process each thread. The kernel's name of a thread has 15 letters at most.
    """
    used: defaultdict[str, float] = defaultdict(float)
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name = part_of(process.cmdline())
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                comm = (thread / "comm").read_text().strip()
                seconds = int((thread / "schedstat").read_text().split()[0]) * NS
                used[f"{name}/{comm}" if name == "model" else name] += seconds
        except (OSError, psutil.Error):
            continue  # it has just ended
    return used


def cpu_since(pid: int, before: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds by part since `before`, which was read by `cpu_by_part`."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in cpu_by_part(pid).items()}


def part_of(command: list[str]) -> str:
    """What a process of `slotline up` is; of other servers the name of the program."""
    words = " ".join(command)
    if "--model-process-of" in words:
        return "model"
    if found := re.search(r"-m slotline (\w+)", words):
        return found[1]
    return Path(command[0]).name if command else "?"
