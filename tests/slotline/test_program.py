from __future__ import annotations

import shlex
import sys

import pytest

from slotline.program import again, program


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [*words])


def test_the_command_is_shown_as_a_shell_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["batch", "run", "my file.jsonl", "-o", "out", "--template", "Say {x} & 'go'"]
    typed(monkeypatch, "/opt/my tools/slotline", *words)
    assert shlex.split(again()) == ["/opt/my tools/slotline", *words]


def test_flags_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "/opt/slotline", "batch", "run", "--overwrite", "in")
    assert again(without=("--overwrite",)) == "/opt/slotline batch run in"


def test_the_short_name_is_shown_where_it_finds_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "/opt/slotline")
    monkeypatch.setattr("shutil.which", lambda name: "/opt/slotline")
    assert program() == "slotline"
    monkeypatch.setattr("shutil.which", lambda name: "/usr/slotline")
    assert program() == "/opt/slotline"


def test_a_module_is_started_by_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "/somewhere/slotline/__main__.py")
    monkeypatch.setattr(sys, "executable", "/my python/bin/python")
    assert program() == "'/my python/bin/python' -m slotline"
