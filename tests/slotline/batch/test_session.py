from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slotline.batch.lines import Line, Rules
from slotline.batch.manifest import Refused
from slotline.batch.problems import BadInput
from slotline.batch.reading import open_source
from slotline.batch.rows import Outcome
from slotline.batch.session import Session, Settings
from slotline.batch.writing import Order, rows_in
from tests.slotline.batch.stand_in import StandIn, StandInBackend, refused, served


class Case:
    """A folder with an input of plain lines, run as often as wanted."""

    def __init__(self, folder: Path, lines: int = 20) -> None:
        self.source = folder / "in.jsonl"
        self.out = folder / "out.jsonl"
        self.write(*({"prompt": f"p{n}", "n": n} for n in range(1, lines + 1)))
        self.runner = StandIn()
        self.said: list[str] = []

    def write(self, *lines: Any) -> None:
        self.source.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))

    def run(
        self, runner: StandIn | None = None, rules: Rules | None = None, model: str = "stand-in", **settings: Any
    ) -> int:
        self.runner, self.said = runner or StandIn(), []
        given = Settings(**{"out": str(self.out), **settings})
        backend: Any = StandInBackend(self.runner, name=model)
        source = open_source(str(self.source))
        return Session(source, rules or Rules(), backend, given, "slotline batch run again", self.said.append).run()

    @property
    def rows(self) -> list[int]:
        return [row["line"] for row, _ in rows_in(self.out)]

    @property
    def told(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def failing(*numbers: int) -> StandIn:
    return StandIn(lambda line: refused(line) if line.number in numbers else served(line))


def test_all_served_is_0_and_every_line_has_its_row(case: Case) -> None:
    assert case.run() == 0
    assert sorted(case.rows) == list(range(1, 21))
    assert "20 of 20 lines answered" in case.told
    assert case.runner.closed == 1


def test_some_failed_is_1_and_the_same_command_runs_only_those_again(case: Case) -> None:
    assert case.run(failing(3, 5)) == 1
    assert "2 lines failed: 2 x too_long; the first, line 3" in case.told
    assert "slotline batch run again" in case.told
    assert case.run() == 0
    assert [line.number for line in case.runner.started] == [3, 5]
    assert sorted(case.rows) == list(range(1, 21))


def test_a_run_that_is_complete_starts_nothing(case: Case) -> None:
    case.run()
    before = case.out.read_bytes()
    assert case.run() == 0
    assert (case.runner.started, case.runner.closed) == ([], 0)
    assert case.out.read_bytes() == before


@pytest.mark.parametrize("order", ["finished", "input"])
def test_a_run_that_stopped_early_is_3_and_goes_on_where_it_was(case: Case, order: Order) -> None:
    assert case.run(StandIn(lost_after=7, pick=2), order=order) == 3
    assert "the server is gone" in case.told
    assert "to go on: slotline batch run again" in case.told
    first = case.rows
    assert len(first) == 7
    assert case.run(order=order) == 0
    assert len(case.runner.started) == 13
    assert not {line.number for line in case.runner.started} & set(first)
    assert (case.rows == list(range(1, 21))) if order == "input" else (sorted(case.rows) == list(range(1, 21)))


def interrupting(number: signal.Signals, after: int) -> StandIn:
    ended: list[Line] = []

    def answer(line: Line) -> Outcome:
        ended.append(line)
        if len(ended) == after:
            os.kill(os.getpid(), number)
        return served(line)

    return StandIn(answer)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 3)])
def test_a_signal_ends_the_run_in_order_and_tells_how_to_go_on(case: Case, number: signal.Signals, status: int) -> None:
    before = signal.getsignal(number)
    assert case.run(interrupting(number, 5)) == status
    assert case.said[-1] == "to go on: slotline batch run again"
    assert len(case.rows) == 5
    assert case.runner.closed == 1
    assert signal.getsignal(number) is before
    assert case.run() == 0
    assert sorted(case.rows) == list(range(1, 21))


def test_broken_input_runs_nothing_and_writes_nothing(case: Case) -> None:
    case.write({"prompt": "a"}, "[1]")
    with pytest.raises(BadInput, match="line 2: not a JSON object"):
        case.run()
    assert case.runner.started == []
    assert not case.out.exists()


def test_another_model_or_template_is_refused_before_anything_runs(case: Case) -> None:
    case.run(StandIn(lost_after=3))
    with pytest.raises(Refused, match='the model: was "stand-in" and is "other"'):
        case.run(model="other")
    with pytest.raises(Refused, match="sampling options"):
        case.run(rules=Rules(options={"top_k": 1}))
    case.source.write_text(case.source.read_text().replace("p1", "q1"))
    with pytest.raises(Refused, match="the input"):
        case.run()
    assert case.runner.started == []
    assert len(case.rows) == 3


def test_the_input_may_be_moved(case: Case) -> None:
    case.run(StandIn(lost_after=3))
    case.source = case.source.rename(case.source.with_name("moved.jsonl"))
    assert case.run() == 0
    assert len(case.runner.started) == 17


def test_overwrite_begins_anew(case: Case) -> None:
    case.run()
    assert case.run(rules=Rules(options={"top_k": 1}), overwrite=True) == 0
    assert [line.number for line in case.runner.started if line.number] == list(range(1, 21))
    assert sorted(case.rows) == list(range(1, 21))


def test_a_run_that_wrote_nothing_stands_in_nobodys_way(case: Case) -> None:
    assert case.run(StandIn(lost_after=0)) == 3
    assert case.rows == []
    assert case.run(rules=Rules(seed=5)) == 0
    assert len(case.rows) == 20


def test_a_line_of_the_first_that_is_not_done_runs_however_many_others_are(case: Case) -> None:
    assert case.run(failing(2)) == 1
    assert case.run(limit=5) == 0
    assert [line.number for line in case.runner.started] == [2]


def test_a_limit_runs_the_first_lines_and_can_be_raised_later(case: Case) -> None:
    assert case.run(limit=5) == 0
    assert sorted(case.rows) == [1, 2, 3, 4, 5]
    assert case.run(limit=5) == 0
    assert case.runner.started == []
    assert case.run() == 0
    assert len(case.runner.started) == 15


def test_failed_lines_go_to_a_file_of_their_own(case: Case, tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    assert case.run(failing(2), errors=errors) == 1
    assert 2 not in case.rows
    assert [row["line"] for row, _ in rows_in(errors)] == [2]
    assert case.run(errors=errors) == 0
    assert errors.read_bytes() == b""
    assert sorted(case.rows) == list(range(1, 21))


def test_openai_lines_are_known_by_their_id_when_the_run_goes_on(case: Case) -> None:
    case.write(
        *(
            {"custom_id": f"id{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{n}"}}
            for n in range(6)
        )
    )
    assert case.run(StandIn(lost_after=2, pick=3)) == 3
    assert case.run() == 0
    assert len(case.runner.started) == 4
    ids = [row["custom_id"] for row, _ in rows_in(case.out)]
    assert sorted(ids) == [f"id{n}" for n in range(6)]
    assert len({row["id"] for row, _ in rows_in(case.out)}) == 6


def test_the_window_is_four_lines_for_each_slot_unless_it_is_given(tmp_path: Path) -> None:
    case = Case(tmp_path, lines=100)
    case.run(StandIn(slots=3))
    assert case.runner.most == 12
    case.run(StandIn(slots=3), window=2, overwrite=True)
    assert case.runner.most == 2


def test_answers_that_were_cut_are_counted(case: Case) -> None:
    def cut(line: Line) -> Outcome:
        return Outcome(line, {**(served(line).answer or {}), "finish_reason": "length"})

    assert case.run(StandIn(cut)) == 0
    assert "20 answers were cut at the length limit" in case.told


@pytest.fixture
def piped(case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Make the input come from standard input."""

    with ExitStack() as files:

        def pipe() -> None:
            text = files.enter_context(io.TextIOWrapper(case.source.open("rb")))
            monkeypatch.setattr(sys, "stdin", text)

        yield pipe
        monkeypatch.undo()


def run_piped(case: Case, runner: StandIn, **settings: Any) -> int:
    case.said = []
    given = Settings(**{"out": str(case.out), **settings})
    backend: Any = StandInBackend(runner)
    return Session(open_source("-"), Rules(), backend, given, "again", case.said.append).run()


def test_standard_input_is_run_but_not_gone_on_with(case: Case, piped: Any) -> None:
    piped()
    assert run_piped(case, StandIn(lost_after=4)) == 3
    assert "what comes from standard input or a pipe cannot be resumed" in case.told
    piped()
    with pytest.raises(Refused, match="standard input"):
        run_piped(case, StandIn())
    piped()
    assert run_piped(case, StandIn(), overwrite=True) == 0
    assert sorted(case.rows) == list(range(1, 21))


def test_standard_input_that_is_broken_lets_the_lines_before_end(case: Case, piped: Any) -> None:
    case.write({"prompt": "a"}, {"prompt": "b"}, "nonsense", {"prompt": "c"})
    piped()
    with pytest.raises(BadInput, match="line 3: not JSON"):
        run_piped(case, StandIn())
    assert sorted(case.rows) == [1, 2]


def test_rows_can_go_to_standard_output(case: Case, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert case.run(StandIn(lost_after=5), out="-") == 3
    rows = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5]
    assert case.said[-1] == "what was written to standard output cannot be resumed"
