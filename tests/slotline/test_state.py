from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slotline.home import STATE_FILE, read_state
from slotline.up.state import ClaimRefused, claim, identity, remove_state, write_state

HOLD = """
import os, subprocess, sys
from pathlib import Path
from slotline.up.state import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
"""


def test_a_directory_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    with claim(tmp_path / "data"), pytest.raises(ClaimRefused), claim(tmp_path / "data"):
        pass
    with claim(tmp_path / "data"):
        assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    with claim(tmp_path):
        write_state(tmp_path, {"pid": os.getpid(), "url": "http://127.0.0.1:8000"})
        with pytest.raises(ClaimRefused) as caught, claim(tmp_path):
            pass
    assert f"already running at http://127.0.0.1:8000: process {os.getpid()} holds {tmp_path}" in str(caught.value)


def test_a_state_of_one_that_is_dead_is_not_taken_for_the_holders(tmp_path: Path) -> None:
    with claim(tmp_path):
        write_state(tmp_path, {"pid": os.getpid() + 1, "url": "http://127.0.0.1:8000"})
        with pytest.raises(ClaimRefused, match=f"already running: process {os.getpid()} holds"), claim(tmp_path):
            pass


def test_the_lock_goes_with_its_process_and_not_to_its_children(tmp_path: Path) -> None:
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    code = f"{HOLD}    print(subprocess.Popen(['sleep', '60'], {quiet}).pid, flush=True)\n    os.kill(os.getpid(), 9)\n"
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    child = int(ended.stdout.split()[1])
    assert ended.returncode == -signal.SIGKILL
    try:
        with claim(tmp_path):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClaimRefused, match="the data directory cannot be used"), claim(tmp_path / "file" / "data"):
        pass


def test_the_state_is_whole_private_and_gone_after_a_clean_stop(tmp_path: Path) -> None:
    write_state(tmp_path, {"url": "http://127.0.0.1:1"})
    write_state(tmp_path, {"url": "http://127.0.0.1:2"})
    assert read_state(tmp_path) == {"url": "http://127.0.0.1:2"}
    assert (tmp_path / STATE_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    remove_state(tmp_path)
    remove_state(tmp_path)
    assert read_state(tmp_path) is None


def test_a_process_is_named_by_its_start_too() -> None:
    assert identity(os.getpid()) == identity(os.getpid())
    assert json.dumps(identity(os.getpid()))
    assert identity(2**22 + 1)["pid"] == 2**22 + 1
