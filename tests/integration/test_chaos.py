"""A short run under chaos. `make chaos` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

KILLS = 6


@pytest.mark.timeout(600)
def test_what_is_killed_loses_nothing_and_streams_have_no_gap() -> None:
    # After a failover a batch may be forgotten that no replica was waited for, which would be no fault here.
    flags = f"--kills {KILLS} --seed 1 --pause-s 0.5 --leave-out fail_over"
    command = [sys.executable, "-m", "tests.chaos", *flags.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-6000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["kills"] >= KILLS
    assert result["jobs"] > 0
    assert result["recovery_max_s"] is not None
