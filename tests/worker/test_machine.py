from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from worker import machine
from worker.machine import cpu_quota, free_memory, physical_cores, usable_cores

GB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path):
    """Writes files of control groups, and what this process' own are."""

    def write(own: str, files: dict[str, str]) -> dict[str, Path]:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return {"groups": tmp_path / "groups", "own": tmp_path / "own"}

    return write


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("0::/", {}, None),
        ("", {"cpu.max": "50000 100000"}, None),
        # The tightest limit on the way up holds.
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2),
        # In a container that shows the host's path.
        ("0::/docker/0123", {"cpu.max": "100000 100000"}, 1),
        ("3:memory:/\n2:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "350000", "cpu/x/cpu.cfs_period_us": "100000"}, 4),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_a_quota_is_as_many_cores(groups, own: str, files: dict[str, str], cores: int | None) -> None:
    assert cpu_quota(**groups(own, files)) == cores


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/", {}, 64 * GB),
        ("0::/", {"memory.max": "max", "memory.current": "1"}, 64 * GB),
        ("0::/", {"memory.max": str(8 * GB), "memory.current": str(3 * GB)}, 5 * GB),
        ("0::/", {"memory.max": str(8 * GB), "memory.current": str(9 * GB)}, 0),
        (
            "0::/a",
            {
                "a/memory.max": str(8 * GB),
                "a/memory.current": str(7 * GB),
                "a/memory.stat": f"anon 1\ninactive_file {GB}",
            },
            2 * GB,
        ),
        (
            "4:memory:/a",
            {"memory/a/memory.limit_in_bytes": str(2 * GB), "memory/a/memory.usage_in_bytes": str(GB)},
            GB,
        ),
        (
            "4:memory:/",
            {"memory/memory.limit_in_bytes": str(1 << 62), "memory/memory.usage_in_bytes": str(GB)},
            64 * GB,
        ),
    ],
)
def test_memory_is_what_machine_and_limits_leave(
    groups, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], left: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 64 * GB}))
    assert free_memory(**groups(own, files)) == left


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        path = tmp_path / f"cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{siblings}\n")
    assert physical_cores([0, 1, 2, 3], tmp_path) == 2
    assert physical_cores([0, 2], tmp_path) == 1
    assert physical_cores([1, 2], tmp_path) == 2


def test_without_a_topology_the_cores_of_the_machine_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert physical_cores([0, 1], tmp_path) == 2
    assert physical_cores(list(range(8)), tmp_path) == 4


def test_cores_are_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "physical_cores", lambda cpus: 8)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 3)
    assert usable_cores() == 3
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    assert usable_cores() == 8


def test_this_machine_has_a_core_and_some_memory() -> None:
    assert usable_cores() >= 1
    assert free_memory() > 0
