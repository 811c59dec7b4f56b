from __future__ import annotations

import io

import pytest
from rich.console import Console

from slotline.batch.progress import LINE_S, PACE_S, Display, Pace, duration
from slotline.batch.running import Tally


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_a_line_is_written_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Display(1000, 100, Console(file=io.StringIO()), clock) as display:
        for second in range(1, 91):
            clock.now = float(second)
            display.look(Tally(ended=5 * second, completion_tokens=50 * second, failed=2), None)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 90 // LINE_S
    assert told[0] == "slotline: 250 of 1000 lines, 5.0 lines/s, 50 tokens/s, 2 min 30 s left, 2 failed"


def test_what_is_waited_for_is_told_and_a_total_that_nobody_knows_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with Display(None, 0, Console(file=io.StringIO()), clock) as display:
        clock.now = LINE_S
        display.look(Tally(ended=3), "the queue is full")
    assert capsys.readouterr().err == "slotline: 3 lines, 0.1 lines/s, 0 tokens/s, waiting: the queue is full\n"


def test_in_a_terminal_there_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with Display(10, 2, Console(file=shown, force_terminal=True, width=120)) as display:
        display.look(Tally(ended=3), None)
    assert "5/10" in shown.getvalue()
    assert capsys.readouterr().err == ""


def test_the_pace_is_that_of_the_last_minute() -> None:
    clock = Clock()
    pace = Pace(clock)
    for second in range(1, 301):
        clock.now = float(second)
        pace.note(second if second <= 100 else 100 + 10 * (second - 100), 0)
    assert pace.rates()[0] == pytest.approx(10, rel=0.01)
    assert PACE_S == 60


def test_a_pace_without_time_is_no_error() -> None:
    assert Pace(Clock()).rates() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (3661, "1 h 1 min"), (-1, "0 s")]
)
def test_durations_are_told_as_people_do(seconds: float, said: str) -> None:
    assert duration(seconds) == said
