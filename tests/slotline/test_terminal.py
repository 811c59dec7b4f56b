from __future__ import annotations

import io
import sys

import pytest

from slotline.up.terminal import Terminal


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_lines_are_as_they_were_with_the_name_before(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    terminal = Terminal()
    terminal.say("Slotline is ready at http://127.0.0.1:8000", "bold")
    terminal.relay("web", "[bold]127.0.0.1[/bold] :smile: " + "x" * 300)
    terminal.relay("worker", "")
    lines = out.getvalue().splitlines()
    assert lines[0] == "Slotline is ready at http://127.0.0.1:8000"
    assert lines[1] == "web    | [bold]127.0.0.1[/bold] :smile: " + "x" * 300
    assert lines[2] == "worker | "
    assert "\x1b" not in out.getvalue()


def test_a_terminal_that_has_gone_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    Terminal().say("anyone there?")
