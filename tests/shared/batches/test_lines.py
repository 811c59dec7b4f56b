from __future__ import annotations

import io
import json
from typing import BinaryIO

import pytest

from shared.batches.lines import LineError, RawLine, Source, parse_line, read_raw
from shared.batches.records import Lines


def request(number: int) -> bytes:
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": "/v1/x", "body": {"n": number}}).encode()


def bitmap(*numbers: int) -> Lines:
    found = bytearray(16)
    for number in numbers:
        found[number // 8] |= 0x80 >> number % 8
    return Lines(bytes(found))


def test_numbers_of_lines_are_those_of_an_editor() -> None:
    data = b"\n" + request(1) + b"\r\n \n" + request(2) + b"\n\n[]"
    assert [(raw.index, raw.number) for raw in read_raw(io.BytesIO(data), 1000)] == [(0, 2), (1, 4), (2, 6)]


def test_a_line_is_read_with_its_place() -> None:
    line = parse_line(RawLine(3, 7, request(1)), 1000)
    assert (line.index, line.number, line.custom_id, line.url, line.body) == (3, 7, "id-1", "/v1/x", {"n": 1})


def test_what_is_wrong_with_a_line_says_where() -> None:
    with pytest.raises(LineError) as caught:
        parse_line(RawLine(3, 7, b"{} {}"), 1000)
    assert caught.value.to_dict() == {
        "code": "invalid_json_line",
        "line": 7,
        "message": "the line is not JSON: trailing characters at column 4",
        "param": None,
    }


def test_lines_that_are_done_are_left_out() -> None:
    source = Source(lambda: io.BytesIO(b"\n\n".join(map(request, range(5)))), bitmap(1, 5))
    numbers = [line.number for line in iter(source.next, None)]
    assert numbers == [3, 7, 9] and source.next() is None


class Breaking(io.BytesIO):
    """Breaks off after two lines."""

    count = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.count += 1
        if self.count > 2:
            raise OSError("the connection is gone")
        return super().readline(size)


def test_reading_goes_on_where_it_broke_off() -> None:
    data = b"\n".join(map(request, range(5)))
    opened: list[BinaryIO] = []

    def open_input() -> BinaryIO:
        opened.append(Breaking(data) if not opened else io.BytesIO(data))
        return opened[-1]

    source = Source(open_input)
    assert [source.next().number for _ in range(2)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        source.next()
    assert [line.number for line in iter(source.next, None)] == [3, 4, 5]
    assert len(opened) == 2 and all(stream.closed for stream in opened)
