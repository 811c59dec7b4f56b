"""Reads records from JSONL, CSV and Parquet, one after the other: memory does not grow with the file."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

from slotline.batch.problems import BadInput, Problem

Format = Literal["jsonl", "csv", "tsv", "parquet"]

#: What a name ends with, behind which `.gz` may come.
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}

STDIN = "-"

#: Rows of a table that are held at once.
ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Record:
    """One line as it was read. `number` is that of the physical line, in a Parquet file that of the row, from 1."""

    number: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """An input and how it is read. What is not a plain file can be read only once."""

    path: str
    format: Format
    is_file: bool

    @property
    def is_table(self) -> bool:
        """Whether records come from columns rather than from JSON objects."""
        return self.format != "jsonl"

    def records(self) -> Iterator[Record | Problem]:
        """Every record, in order. Blank lines are passed over but counted.

        Raises:
            BadInput: nothing more can be read of it.
        """
        try:
            if self.format == "parquet":
                yield from _parquet(self.path)
                return
            with _open(self.path) as raw:
                yield from _jsonl(raw) if self.format == "jsonl" else _csv(raw, "\t" if self.format == "tsv" else ",")
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput([Problem(None, f"{self.path} cannot be read: {error}")]) from None

    def digest(self) -> tuple[int, str]:
        """Size and SHA-256 of the file as it lies there.

        Raises:
            BadInput: it cannot be read.
        """
        try:
            with Path(self.path).open("rb") as raw:
                return Path(self.path).stat().st_size, hashlib.file_digest(raw, "sha256").hexdigest()
        except OSError as error:
            raise BadInput([Problem(None, f"{self.path} cannot be read: {error}")]) from None


def open_source(path: str, given: Format | None = None) -> Source:
    """Find out how an input is to be read. `-` is standard input.

    Raises:
        BadInput: there is no such file, or nothing says what it holds.
    """
    if path == STDIN:
        if given == "parquet":
            raise BadInput([Problem(None, "Parquet cannot be read from standard input: name a file")])
        return Source(path, given or "jsonl", is_file=False)
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise BadInput([Problem(None, f"{path} cannot be read: {error.strerror}")]) from None
    if stat.S_ISDIR(mode):
        raise BadInput([Problem(None, f"{path} is a folder")])
    found = given or FORMATS.get(Path(path.removesuffix(".gz")).suffix.lower(), "jsonl")
    if found == "parquet" and path.endswith(".gz"):
        raise BadInput([Problem(None, f"{path}: a Parquet file is compressed inside; unpack the .gz first")])
    return Source(path, found, is_file=stat.S_ISREG(mode))


def _open(path: str) -> IO[bytes]:
    if path == STDIN:
        if sys.stdin is None:
            raise OSError("standard input is closed")
        return io.BufferedReader(io.FileIO(sys.stdin.fileno(), closefd=False))
    return io.BufferedReader(gzip.GzipFile(path)) if path.endswith(".gz") else Path(path).open("rb")


def _jsonl(raw: Iterable[bytes]) -> Iterator[Record | Problem]:
    for number, line in enumerate(raw, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            try:
                yield Record(number, json_object(line))
            except ValueError as error:
                yield Problem(number, str(error))


def json_object(line: bytes) -> dict[str, Any]:
    """One line of JSON as a dictionary.

    Raises:
        ValueError: it is not an object of valid JSON in UTF-8; the message is for people.
    """
    try:
        value = json.loads(line.decode(), parse_constant=_no_constant, parse_float=_finite)
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}") from None
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (character {error.pos + 1}){_advice(line)}") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _advice(line: bytes) -> str:
    return "; a file that is one JSON array becomes JSONL with `jq -c '.[]'`" if line.lstrip()[:1] == b"[" else ""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"there is no {name}")


def _finite(text: str) -> float:
    """A number; one that is too large would come back as `Infinity`, which is no JSON."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _csv(raw: IO[bytes], delimiter: str) -> Iterator[Record | Problem]:
    csv.field_size_limit(2**31 - 1)
    # What is no UTF-8 is let through here, so that it can be told of the line it is in.
    with io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="") as text:
        yield from _csv_rows(text, delimiter)


def _csv_rows(text: IO[str], delimiter: str) -> Iterator[Record | Problem]:
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise BadInput([Problem(number, f"not CSV: {error}")]) from None
        if row and not header:
            header = _header(row)
        elif row:
            yield _csv_record(number, header, row)


def _header(row: list[str]) -> list[str]:
    twice = sorted({name for name in row if row.count(name) > 1})
    if twice:
        raise BadInput([Problem(1, f"the heading names {twice[0]!r} twice")])
    if not all(map(_is_text, row)):
        raise BadInput([Problem(1, "the heading is not UTF-8")])
    return row


def _csv_record(number: int, header: list[str], row: list[str]) -> Record | Problem:
    if len(row) != len(header):
        return Problem(number, f"has {len(row)} fields, the heading has {len(header)}")
    bad = next((name for name, value in zip(header, row, strict=True) if not _is_text(value)), None)
    if bad is not None:
        return Problem(number, f"column {bad!r} is not UTF-8")
    return Record(number, dict(zip(header, row, strict=True)))


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\udc80" <= char <= "\udcff" for char in value)


def _parquet(path: str) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        advice = f"{path} is Parquet, which needs pyarrow: pip install 'slotline[tables]'"
        raise BadInput([Problem(None, advice)]) from None
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise BadInput([Problem(None, f"{path} names the column {twice!r} twice")])
            number = 0
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(number, {name: _as_json(value) for name, value in row.items()})
    except ArrowException as error:
        raise BadInput([Problem(None, f"{path} is not a Parquet file that can be read: {error}")]) from None
    except (ValueError, OverflowError) as error:
        # Text that is not UTF-8, a year beyond 9999, nanoseconds without pandas.
        place = f"among its rows {number + 1} to {number + ROWS_AT_ONCE}"
        raise BadInput([Problem(None, f"{path} has a value {place} that cannot be read: {error}")]) from None


def _as_json(value: Any) -> Any:
    """A value of a table as JSON knows it: moments in ISO 8601, NaN as null, whatever else as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    spell: Callable[[Any], str] = _spelling(value)
    return spell(value)


def _spelling(value: Any) -> Callable[[Any], str]:
    if isinstance(value, datetime | date | time):
        return lambda moment: str(moment.isoformat())
    if isinstance(value, timedelta):
        return lambda span: f"{span.total_seconds():g}"
    if isinstance(value, bytes):
        return lambda data: data.decode("utf-8", "replace")
    return str
