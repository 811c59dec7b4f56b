"""The storage below gevent, in a process of its own, since patching cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.settings import Settings, load
from shared.storage import FolderStorage, UrlStorage
from webapi.storage import web_storage

SLOW_DISK = """
from gevent import monkey
monkey.patch_all()
import os, sys, threading, gevent
from shared.settings import Settings, load
from webapi.storage import web_storage

wait = monkey.get_original("time", "sleep")
os.fsync = lambda file: wait(0.3)
ticks = []
def tick():
    while True:
        ticks.append(1)
        gevent.sleep(0.01)
gevent.spawn(tick)
storage = web_storage(load(Settings, {"files_url": sys.argv[1]}))
storage.write("a", b"1")
print(len(ticks), storage.size("a"))
"""

UNKNOWN = """
import logging, sys
from gevent import monkey
monkey.patch_all()
from shared.settings import Settings, load
from webapi.storage import web_storage

logging.basicConfig(stream=sys.stdout)
web_storage(load(Settings, {"files_url": sys.argv[1]}))
print("made")
"""


def below_gevent(script: str, url: str) -> str:
    command = [sys.executable, "-c", script, url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.integration
def test_other_requests_go_on_while_a_file_is_brought_to_the_disk(tmp_path: Path) -> None:
    ticks, size = below_gevent(SLOW_DISK, str(tmp_path)).split()
    assert int(ticks) > 5
    assert size == "1"


@pytest.mark.integration
def test_a_storage_that_cannot_be_used_is_logged_and_the_server_starts(tmp_path: Path) -> None:
    said = below_gevent(UNKNOWN, "s9://bucket")
    assert "files and batches are out of order" in said
    assert "s9" in said
    assert said.endswith("made\n")


def test_without_gevent_it_is_the_storage_of_the_settings(tmp_path: Path) -> None:
    assert isinstance(web_storage(load(Settings, {"files_url": str(tmp_path)})), FolderStorage)
    assert isinstance(web_storage(load(Settings, {"files_url": "s3://bucket"})), UrlStorage)
