"""The input of a batch: one request on each line, as JSON.

Lines are read one by one, whatever the size of the file. Blank ones are passed over; numbers are those of an editor,
counted from 1 with the blank ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic_core import from_json

from shared.batches.records import Lines

#: Longest `custom_id`, in characters.
MAX_CUSTOM_ID = 512

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank. `index` counts requests from 0; `data` is None where it is too long."""

    index: int
    number: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch."""

    index: int
    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """What is wrong with one line, as `errors.data` of a batch lists it; `line` is None for the file as a whole."""

    def __init__(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.line = line

    def to_dict(self) -> dict[str, Any]:
        """The entry of the list."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


def read_raw(stream: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """The lines of a file that are not blank; at most `max_bytes` of one are held in memory."""
    index = number = 0
    while data := stream.readline(max_bytes + 1):
        number += 1
        whole = data.endswith(b"\n") or len(data) <= max_bytes
        if not whole:
            _skip_rest(stream)
        if number == 1:
            data = data.removeprefix(BOM)
        if whole and not data.strip():
            continue
        yield RawLine(index, number, data if whole else None)
        index += 1


def _skip_rest(stream: BinaryIO) -> None:
    while (data := stream.readline(1 << 16)) and not data.endswith(b"\n"):
        pass


def parse_line(raw: RawLine, max_bytes: int) -> Line:
    """Read one line and check its structure; whether its body can be served is not looked at.

    Raises:
        LineError: says what is wrong.
    """
    try:
        return _parse(raw, max_bytes)
    except LineError as error:
        error.line = raw.number
        raise


def _parse(raw: RawLine, max_bytes: int) -> Line:
    if raw.data is None:
        raise LineError("line_too_long", f"the line is longer than {max_bytes} bytes")
    request = _json(raw.data)
    if not isinstance(request, dict):
        raise LineError("invalid_request", "the line is not a JSON object")
    custom_id = _custom_id(request)
    for name in ("method", "url", "body"):
        if name not in request:
            raise LineError("missing_required_parameter", f"`{name}` is missing", name)
    if request["method"] != "POST":
        raise LineError("invalid_method", "`method` must be POST", "method")
    if not isinstance(request["url"], str):
        raise LineError("invalid_url", "`url` must be text", "url")
    return Line(raw.index, raw.number, custom_id, request["url"], _body(request["body"]))


def _json(data: bytes) -> Any:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        try:
            data.decode()
        except UnicodeDecodeError as wrong:
            message = f"the line is not UTF-8: {wrong.reason} at byte {wrong.start}"
            raise LineError("invalid_encoding", message) from None
        message = str(error).replace(" at line 1 column ", " at column ")
        raise LineError("invalid_json_line", f"the line is not JSON: {message}") from None


def _custom_id(request: dict[str, Any]) -> str:
    custom_id = request.get("custom_id")
    if custom_id is None or custom_id == "":
        raise LineError("missing_custom_id", "`custom_id` is missing or empty", "custom_id")
    if not isinstance(custom_id, str):
        raise LineError("invalid_custom_id", "`custom_id` must be text", "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        raise LineError("invalid_custom_id", f"`custom_id` is longer than {MAX_CUSTOM_ID} characters", "custom_id")
    return custom_id


def _body(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise LineError("invalid_body", "`body` must be an object", "body")
    if body.get("stream"):
        raise LineError("stream_not_supported", "a batch cannot stream: leave `stream` out", "body.stream")
    if not isinstance(body.get("model"), str | None):
        raise LineError("invalid_model", "`model` must be text", "body.model")
    return body


#: The limit was seen to when the input was checked, and may have been another one then.
CHECKED_BYTES = 1 << 40
NONE_DONE = Lines()


class Source:
    """The requests of an input that have no row yet, in their order. An error while reading may be followed by more.

    Args:
        open_input: opens an input that was checked, at its start.
        done: numbers of lines to leave out.
    """

    def __init__(self, open_input: Callable[[], BinaryIO], done: Lines = NONE_DONE) -> None:
        self._open = open_input
        self._done = done
        self._stream: BinaryIO | None = None
        self._lines: Iterator[RawLine] = iter(())
        self._last = 0

    def next(self) -> Line | None:
        """The next request, None behind the last.

        Raises:
            LineError: the line cannot be read, though it could when the input was checked.
        """
        if self._stream is None:
            self._stream = self._open()
            self._lines = read_raw(self._stream, CHECKED_BYTES)
        try:
            raw = next((raw for raw in self._lines if raw.number > self._last and raw.number not in self._done), None)
        except Exception:
            self.close()
            raise
        if raw is None:
            self.close()
            return None
        self._last = raw.number
        return parse_line(raw, CHECKED_BYTES)

    def close(self) -> None:
        """Close the input; it is opened again where it is needed."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
