from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import platformdirs
import pytest

from slotline.home import DEFAULT_URL, STATE_FILE, data_dir, default_url, read_state, running_state


def write(home: Path, state: object) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / STATE_FILE).write_text(state if isinstance(state, str) else json.dumps(state))


def test_the_variable_names_the_data_directory(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_dir() == own_home
    monkeypatch.setenv("SLOTLINE_DATA_DIR", "~/elsewhere")
    assert data_dir() == Path.home() / "elsewhere"


@pytest.mark.parametrize("base", [None, "", "/data"])
def test_without_it_the_directory_is_the_platforms(base: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOTLINE_DATA_DIR")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_DATA_HOME", base)
    assert data_dir() == Path(platformdirs.user_data_dir("slotline"))


def test_on_a_mac_it_is_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOTLINE_DATA_DIR")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert data_dir() == Path.home() / "Library/Application Support/slotline"


def test_the_server_is_the_variables_then_the_running_ones_then_port_8000(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_url() == DEFAULT_URL
    write(own_home, {"pid": os.getpid(), "url": "http://127.0.0.1:1234"})
    assert default_url() == "http://127.0.0.1:1234"
    monkeypatch.setenv("SLOTLINE_URL", "http://there:80")
    assert default_url() == "http://there:80"


@pytest.mark.parametrize("pid", [2**22 + 1, 0, -1, None, "7"])
def test_a_state_whose_process_is_gone_does_not_count(own_home: Path, pid: object) -> None:
    write(own_home, {"pid": pid, "url": "http://127.0.0.1:1234"})
    assert read_state(own_home) is not None
    assert running_state() is None
    assert default_url() == DEFAULT_URL


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_state_file_that_cannot_be_read_does_not_count(own_home: Path, text: str) -> None:
    write(own_home, text)
    assert read_state(own_home) is None
    assert running_state() is None
