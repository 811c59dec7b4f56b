"""A parser of Server-Sent Events that keeps to the standard.

*Source:* WHATWG HTML, section 9.2.6, "Interpreting an event stream". Lines end with CR, LF or CR LF; a byte
order mark at the very start is dropped; comments and unknown fields are ignored; an event that was not ended
by a blank line when the connection closed never happened. `retry` is left to whoever reconnects.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n)")


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event. `id` is the newest id seen on the stream so far, as EventSource gives it."""

    name: str
    data: str
    id: str

    def json(self) -> Any:
        """`data`, parsed.

        Raises:
            ValueError: it is not JSON.
        """
        return json.loads(self.data)


class SseParser:
    """Turns the bytes of one connection into events, whatever the pieces they arrive in."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._rest = ""
        self._after_cr = False
        self._name = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take the next bytes; return the events they complete."""
        text = self._decoder.decode(chunk)
        if self._after_cr and text:
            # The CR of a CR LF ended the last piece and has been taken as a line end by itself.
            self._after_cr = False
            text = text.removeprefix("\n")
        text = self._rest + text
        events: list[SseEvent] = []
        end = 0
        for match in _LINE.finditer(text):
            end = match.end()
            self._after_cr = match[2] == "\r" and end == len(text)
            if (event := self._line(match[1])) is not None:
                events.append(event)
        self._rest = text[end:]
        return events

    def _line(self, line: str) -> SseEvent | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        elif field == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> SseEvent | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return SseEvent(name, "\n".join(data), self._id) if data else None
