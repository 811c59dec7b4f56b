from __future__ import annotations

import gzip
import io
import json
import os
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slotline.batch.problems import BadInput, Problem
from slotline.batch.reading import Record, open_source


def read(path: Path, form: str | None = None) -> list[Record | Problem]:
    return list(open_source(str(path), form).records())  # type: ignore[arg-type]


def written(tmp_path: Path, data: bytes, name: str = "in.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_blank_lines_are_passed_over_and_numbers_stay_those_of_the_file(tmp_path: Path) -> None:
    found = read(written(tmp_path, b'{"a": 1}\r\n\n  \t\n{"a": 2}\n\n'))
    assert found == [Record(1, {"a": 1}), Record(4, {"a": 2})]


def test_the_last_line_needs_no_line_end_and_the_first_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    assert read(written(tmp_path, b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')) == [Record(1, {"a": 1}), Record(2, {"a": 2})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1, 2]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "not JSON: there is no NaN"),
        (b'{"a": [1.5, -1e999]}', "not JSON: the number -1e999 is too large"),
        (b'[{"a": 1},', "a file that is one JSON array becomes JSONL with `jq -c '.[]'`"),
        (b'{"a": "\xff"}', "not UTF-8: byte 8 of the line is 0xff"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_broken_line_is_a_problem_of_its_own(tmp_path: Path, line: bytes, reason: str) -> None:
    good, bad, last = read(written(tmp_path, b'{"a": 1}\n' + line + b'\n{"a": 2}\n'))
    assert (good, last) == (Record(1, {"a": 1}), Record(3, {"a": 2}))
    assert isinstance(bad, Problem)
    assert bad.line == 2
    assert reason in bad.message


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    data = json.dumps({"a": "x\u2028y"}, ensure_ascii=False).encode()
    assert read(written(tmp_path, data)) == [Record(1, {"a": "x\u2028y"})]


def test_gz_is_unpacked_on_the_way(tmp_path: Path) -> None:
    assert read(written(tmp_path, gzip.compress(b'{"a": 1}\n'), "in.jsonl.gz")) == [Record(1, {"a": 1})]
    assert read(written(tmp_path, gzip.compress(b"a\n1\n"), "in.csv.gz")) == [Record(2, {"a": "1"})]


def test_a_gz_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(os.urandom(5000).hex().encode())[:-2000], "in.jsonl.gz")
    with pytest.raises(BadInput, match="cannot be read"):
        read(path)


def test_csv_gives_columns_as_text_with_the_line_each_record_begins_on(tmp_path: Path) -> None:
    data = '\ufeffname,text\r\nAnn,"two\nlines, one comma"\r\n\r\nBob,é\r\n'
    assert read(written(tmp_path, data.encode(), "in.csv")) == [
        Record(2, {"name": "Ann", "text": "two\nlines, one comma"}),
        Record(5, {"name": "Bob", "text": "é"}),
    ]


def test_tsv_is_csv_with_tabs(tmp_path: Path) -> None:
    assert read(written(tmp_path, b"a\tb\n1,5\t2\n", "in.tsv")) == [Record(2, {"a": "1,5", "b": "2"})]


def test_a_csv_row_of_another_length_or_encoding_is_a_problem(tmp_path: Path) -> None:
    found = read(written(tmp_path, b"a,b\n1\n1,2,3\n1,\xff\n1,2\n", "in.csv"))
    assert found == [
        Problem(2, "has 1 fields, the heading has 2"),
        Problem(3, "has 3 fields, the heading has 2"),
        Problem(4, "column 'b' is not UTF-8"),
        Record(5, {"a": "1", "b": "2"}),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"a,b,a\n1,2,3\n", "names 'a' twice"), (b'a\n"open', "not CSV"), (b"\xff\n1\n", "heading is not UTF-8")],
)
def test_csv_that_cannot_be_read_on_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read(written(tmp_path, data, "in.csv"))


def test_parquet_rows_become_json(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    columns = {
        "n": [1, 2],
        "x": [0.5, float("nan")],
        "when": [moment, None],
        "price": [Decimal("1.50"), None],
        "parts": [["a"], []],
        "raw": [b"hi", b""],
    }
    pq.write_table(pa.table(columns), path)
    assert read(path) == [
        Record(1, {"n": 1, "x": 0.5, "when": moment.isoformat(), "price": "1.50", "parts": ["a"], "raw": "hi"}),
        Record(2, {"n": 2, "x": None, "when": None, "price": None, "parts": [], "raw": ""}),
    ]


def test_parquet_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a Parquet file"):
        read(written(tmp_path, b"PAR? no", "in.parquet"))


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([2**62], pa.timestamp("us")), "out of range"),
        (pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers()), "invalid start byte"),
    ],
)
def test_a_parquet_value_that_cannot_be_read_is_told(tmp_path: Path, column: Any, reason: str) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": column}), path)
    with pytest.raises(BadInput, match=f"among its rows 1 to 256 that cannot be read: .*{reason}"):
        read(path)


def test_parquet_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["x", "x"]), path)
    with pytest.raises(BadInput, match="names the column 'x' twice"):
        read(path)


def test_a_standard_input_that_is_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(BadInput, match="standard input is closed"):
        list(open_source("-").records())


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"pip install 'slotline\[tables\]'"):
        read(written(tmp_path, b"PAR1", "in.parquet"))


def test_the_format_can_be_named(tmp_path: Path) -> None:
    assert read(written(tmp_path, b"a\n1\n", "in.txt"), "csv") == [Record(2, {"a": "1"})]


@pytest.mark.parametrize(("name", "reason"), [("none.jsonl", "No such file"), ("", "is a folder")])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        open_source(str(tmp_path / name))


def test_parquet_can_be_neither_piped_nor_packed(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="standard input"):
        open_source("-", "parquet")
    with pytest.raises(BadInput, match="compressed inside"):
        open_source(str(written(tmp_path, b"", "in.parquet.gz")))


def test_standard_input_is_read_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "wb") as feeder:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        source = open_source("-")
        records = source.records()
        feeder.write(b'{"a": 1}\n')
        feeder.flush()
        assert next(records) == Record(1, {"a": 1})
        assert not source.is_file


def test_the_digest_is_of_size_and_content(tmp_path: Path) -> None:
    one = open_source(str(written(tmp_path, b'{"a": 1}\n'))).digest()
    same = open_source(str(written(tmp_path, b'{"a": 1}\n', "copy.jsonl"))).digest()
    other = open_source(str(written(tmp_path, b'{"a": 2}\n', "other.jsonl"))).digest()
    assert one == same
    assert one[0] == 9
    assert one != other
