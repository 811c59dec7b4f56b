"""What this process may use of the machine: cores and memory, by its affinity and its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
CPUS = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Physical cores this process may use: two hyper-threads of one core count once, and a quota is kept."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = physical_cores(allowed)
    return max(1, min(cores, cpu_quota() or cores))


def physical_cores(cpus: list[int], folder: Path = CPUS) -> int:
    """How many cores these logical CPUs are."""
    try:
        return len({(folder / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus})
    except OSError:  # not Linux
        return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))


def cpu_quota(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Cores that the CPU quota comes to, rounded up; None without one."""
    quotas = []
    for folder in _folders("cpu", groups, own):
        words = (_text(folder / "cpu.max") or _text(folder / "cpu.cfs_quota_us")).split()
        period = words[1] if len(words) > 1 else _text(folder / "cpu.cfs_period_us")
        # Neither `max` nor -1 is a limit.
        if words and words[0].isdigit() and period.isdigit():
            quotas.append(max(1, ceil(int(words[0]) / int(period))))
    return min(quotas, default=None)


def free_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Bytes of RAM that can still be used without swapping: the machine's, or what a memory limit leaves."""
    available: int = psutil.virtual_memory().available
    return min([available, *_left_by_limits(groups, own)])


def _left_by_limits(groups: Path, own: Path) -> Iterator[int]:
    for folder in _folders("memory", groups, own):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            yield max(0, int(limit) - int(used) + _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Bytes of files that were read and can be dropped: a group is charged for them too."""
    figures = dict(line.split() for line in _text(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)


def _folders(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """The folders of this process' control group and those above it; a limit of any of them holds.

    Source: the manual page cgroups(7). A line of the file is `number:controllers:path`; version 2 has no controllers,
    version 1 a hierarchy for each. Inside a container the path may be one of the host's, of which only the top is seen.
    """
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controller if controllers else groups
        inside = top / path.lstrip("/")
        while inside != top:
            yield inside
            inside = inside.parent
        yield top


def _text(path: Path) -> str:
    """A small file of the kernel; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
