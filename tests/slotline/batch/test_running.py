from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slotline.batch.failures import FailureLimit
from slotline.batch.index import LineIndex
from slotline.batch.lines import Line
from slotline.batch.problems import BadInput, Problem
from slotline.batch.rows import Outcome
from slotline.batch.running import Ending, Run, Tally
from slotline.batch.writing import Output, rows_in
from tests.slotline.batch.stand_in import StandIn, refused, served


class Watcher:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def look(self, tally: Tally, trouble: str | None) -> None:
        self.seen.append(tally.ended)


def line(number: int) -> Line:
    return Line(number, {"prompt": f"p{number}"}, "/v1/jobs", {"prompt": f"p{number}"})


class Case:
    def __init__(self, folder: Path, runner: StandIn, limit: FailureLimit | None = None, window: int = 4) -> None:
        self.out = folder / "out.jsonl"
        self.runner = runner
        self.limit = limit or FailureLimit()
        self.window = window
        self.pulled = 0
        self.interrupt_after: int | None = None
        self.tally = Tally()
        self.watcher = Watcher()

    def run(self, count: int, broken: bool = False) -> Ending:
        with LineIndex() as index, Output(str(self.out), None, "finished", index) as output:
            run = Run(
                self._lines(count, broken),
                self.runner,
                output,
                window=self.window,
                limit=self.limit,
                name="run",
                watcher=self.watcher,
                interrupted=lambda: self.interrupt_after is not None and run.tally.ended >= self.interrupt_after,
            )
            try:
                return run.run()
            finally:
                self.tally = run.tally

    def _lines(self, count: int, broken: bool) -> Iterator[Line]:
        for number in range(1, count + 1):
            self.pulled += 1
            yield line(number)
        if broken:
            raise BadInput([Problem(count + 1, "not JSON")])

    @property
    def rows(self) -> list[int]:
        return [row["line"] for row, _ in rows_in(self.out)]


@pytest.mark.parametrize("pick", [0, -1, 2])
def test_every_line_gets_one_row_with_its_own_answer_in_whatever_order_they_end(tmp_path: Path, pick: int) -> None:
    case = Case(tmp_path, StandIn(pick=pick, at_once=3), window=7)
    assert case.run(200) == Ending("done")
    assert sorted(case.rows) == list(range(1, 201))
    assert all(row["text"] == f"p{row['line']}" for row, _ in rows_in(case.out))


def test_no_more_lines_are_under_way_or_read_than_the_window_allows(tmp_path: Path) -> None:
    case = Case(tmp_path, StandIn(), window=5)
    case.interrupt_after = 10
    assert case.run(1000).how == "interrupted"
    assert case.runner.most == 5
    assert case.pulled == 14, "ten that ended, and four under way"


def test_a_failed_line_is_a_row_and_the_others_run(tmp_path: Path) -> None:
    case = Case(tmp_path, StandIn(lambda at: refused(at) if at.number == 2 else served(at)))
    assert case.run(3) == Ending("done")
    errors = [row["error"] and row["error"]["code"] for row, _ in rows_in(case.out)]
    assert errors == [None, "too_long", None]
    assert (case.tally.ended, case.tally.failed) == (3, 1)
    assert case.tally.first_error == "line 2: `prompt` is too long (too_long)"


def test_a_run_whose_first_fifty_lines_all_fail_is_stopped(tmp_path: Path) -> None:
    case = Case(tmp_path, StandIn(refused))
    ending = case.run(1000)
    assert (ending.how, ending.reason) == ("stopped", "the first 50 lines have all failed")
    assert len(case.rows) == 50


def test_a_run_that_has_ended_was_not_stopped_by_its_last_failure(tmp_path: Path) -> None:
    case = Case(tmp_path, StandIn(refused), FailureLimit(count=2))
    assert case.run(3) == Ending("done")


def test_a_runner_that_is_lost_stops_the_run_and_keeps_the_rows(tmp_path: Path) -> None:
    case = Case(tmp_path, StandIn(lost_after=6))
    assert case.run(100) == Ending("stopped", "the server is gone")
    assert case.rows == [1, 2, 3, 4, 5, 6]


def test_input_that_breaks_off_lets_what_is_under_way_end_first(tmp_path: Path) -> None:
    case = Case(tmp_path, StandIn(), window=100)
    with pytest.raises(BadInput, match="line 8: not JSON"):
        case.run(7, broken=True)
    assert case.rows == [1, 2, 3, 4, 5, 6, 7]


def test_the_tally_counts_tokens_and_cut_answers(tmp_path: Path) -> None:
    def cut(at: Line) -> Outcome:
        return Outcome(at, {**(served(at).answer or {}), "finish_reason": "length"})

    case = Case(tmp_path, StandIn(cut))
    case.run(4)
    assert (case.tally.cut, case.tally.prompt_tokens, case.tally.completion_tokens) == (4, 12, 8)
    assert case.watcher.seen[-1] == 4
