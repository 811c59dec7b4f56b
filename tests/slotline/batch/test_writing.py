from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotline.batch.index import LineIndex
from slotline.batch.manifest import Refused
from slotline.batch.writing import FLUSH_ROWS, Order, Output, rows_in, unsorted_path


def row(line: int, error: Any = None) -> dict[str, Any]:
    return {"id": line * 10, "line": line, "text": None if error else f"t{line}", "error": error}


FAILED = {"message": "no", "code": "no"}


def text(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(r) + "\n" for r in rows)


def lines_of(path: Path) -> list[int]:
    return [found["line"] for found, _ in rows_in(path)]


class Case:
    """An output in a folder of its own, taken up again as often as wanted."""

    def __init__(self, folder: Path, order: Order = "finished", errors: bool = False) -> None:
        self.out = folder / "out.jsonl"
        self.errors = folder / "errors.jsonl" if errors else None
        self.order: Order = order
        self.done: list[int] = []

    def go_on(self, *rows: dict[str, Any], complete: bool = False) -> int:
        with LineIndex() as index:
            output = Output(str(self.out), self.errors, self.order, index)
            failed = output.resume()
            self.done = [line for line in range(100) if index.done(line) is not None]
            with output:
                for r in rows:
                    output.write(r, failed=r["error"] is not None)
                if complete:
                    output.complete()
        return failed


def test_rows_are_appended_start_after_start(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.go_on(row(2), row(1))
    assert case.go_on(row(3)) == 0
    assert case.done == [1, 2]
    assert lines_of(case.out) == [2, 1, 3]


def test_a_torn_last_row_is_cut_off_and_its_line_is_not_done(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for torn in ('{"id": 3, "li', json.dumps(row(3)), "\0\0\0\n"):
        case.out.write_text(text(row(1), row(2)) + torn)
        case.go_on(row(3))
        assert case.done == [1, 2]
        assert lines_of(case.out) == [1, 2, 3]


def test_a_broken_row_before_the_last_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    case = Case(tmp_path)
    before = text(row(1)) + "edited\n" + text(row(2))
    case.out.write_text(before)
    with pytest.raises(Refused, match="line 2 is not a row"):
        case.go_on()
    assert case.out.read_text() == before


def test_failed_rows_are_taken_out_to_run_again(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.go_on(row(1), row(2, FAILED), row(3))
    assert case.go_on(row(2)) == 1
    assert case.done == [1, 3]
    assert lines_of(case.out) == [1, 3, 2]


def test_rows_of_failed_lines_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    case = Case(tmp_path, errors=True)
    case.go_on(row(1), row(2, FAILED))
    assert case.errors is not None
    assert (lines_of(case.out), lines_of(case.errors)) == ([1], [2])
    assert case.go_on(row(2)) == 1
    assert (lines_of(case.out), lines_of(case.errors)) == ([1, 2], [])


def test_two_rows_for_one_line_are_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.out.write_text(text(row(1), row(1)))
    with pytest.raises(Refused, match="two rows for one line: line 1"):
        case.go_on()


def test_an_openai_row_is_found_by_its_id(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    good = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    bad = {"custom_id": "b", "response": {"status_code": 400, "body": {"error": {}}}, "error": None}
    out.write_text(text(good, bad))
    with LineIndex() as index:
        index.add_id("a", 4)
        index.add_id("b", 5)
        assert Output(str(out), None, "finished", index).resume() == 1
        assert (index.done(4), index.done(5)) == (b"", None)
    assert out.read_text() == text(good)


def test_an_id_that_is_not_in_the_input_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(text({"custom_id": "z", "response": {"status_code": 200}}))
    with LineIndex() as index, pytest.raises(Refused, match="belongs to no line.*'z'"):
        Output(str(out), None, "finished", index).resume()


def test_in_the_order_of_the_input_rows_are_put_in_order_at_every_end(tmp_path: Path) -> None:
    case = Case(tmp_path, "input")
    case.go_on(row(3), row(1))
    assert lines_of(case.out) == [1, 3]
    case.go_on(row(2), complete=True)
    assert case.done == [1, 3]
    assert lines_of(case.out) == [1, 2, 3]
    assert not unsorted_path(case.out).exists()


def test_in_the_order_of_the_input_a_kill_loses_no_row_that_was_written(tmp_path: Path) -> None:
    case = Case(tmp_path, "input")
    case.out.write_text(text(row(1)))  # of an end before the last start
    unsorted_path(case.out).write_text(text(row(1), row(5)) + '{"id": 4')
    case.go_on(row(4), complete=True)
    assert case.done == [1, 5]
    assert lines_of(case.out) == [1, 4, 5]


def test_in_the_order_of_the_input_failed_lines_get_their_place_when_they_run_again(tmp_path: Path) -> None:
    case = Case(tmp_path, "input")
    case.go_on(row(3), row(2, FAILED), row(1), complete=True)
    assert lines_of(case.out) == [1, 2, 3]
    assert case.go_on(row(2), complete=True) == 1
    assert lines_of(case.out) == [1, 2, 3]
    assert [found["error"] for found, _ in rows_in(case.out)] == [None, None, None]


def test_many_rows_reach_the_file_before_the_end_and_few_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path)
    now = [0.0]
    monkeypatch.setattr("slotline.batch.writing.time.monotonic", lambda: now[0])
    with LineIndex() as index, Output(str(case.out), None, "finished", index) as output:
        for line in range(FLUSH_ROWS):
            output.write(row(line), failed=False)
        assert len(lines_of(case.out)) == FLUSH_ROWS
        output.write(row(FLUSH_ROWS), failed=False)
        output.tick()
        assert len(lines_of(case.out)) == FLUSH_ROWS
        now[0] += 1.0
        output.tick()
        assert len(lines_of(case.out)) == FLUSH_ROWS + 1


@pytest.mark.parametrize(("order", "expected"), [("finished", [2, 1]), ("input", [1, 2])])
def test_standard_output_gets_the_rows_in_either_order(
    order: Order, expected: list[int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with LineIndex() as index, Output("-", None, order, index) as output:
        output.write(row(2), failed=False)
        output.write(row(1), failed=False)
    assert [json.loads(line)["line"] for line in capsysbinary.readouterr().out.splitlines()] == expected
