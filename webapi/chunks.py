"""A call's answer as a stream of chunks.

Every frame is `data:` and one line of JSON. The stream ends with `[DONE]`, or with one frame `{"error": …}` and
without it, so that a failure never looks like an end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from shared.errors import InternalError, SlotlineError
from shared.stream import PROGRESS, Event, dumps
from webapi.calls import CallerLeft, OpenCall
from webapi.follow import News
from webapi.sse import CONNECTED, DONE, KEEP_ALIVE, frame

log = logging.getLogger(__name__)

#: Data of a token that only adds text, as nearly all are. Its text is passed on as the JSON it is: reading and writing
#: every token again would take most of the time that it costs here.
PLAIN_TOKEN = re.compile(r'\{"index":\d+,"text":("(?:[^"\\]|\\.)*"),"token":\d+\}')
NO_TEXT = '""'
#: A text that no chunk has elsewhere.
MARK = "\0"


def chunk_frames(call: OpenCall) -> Iterator[bytes]:
    """The whole stream, its first bytes at once."""
    try:
        yield CONNECTED + b"".join(_openings(call))
        chunks = Chunks(call)
        for together in call.news():
            frames = chunks.frames(together) if together else KEEP_ALIVE
            if frames:
                yield frames
        if call.exchange.include_usage:
            yield _frame(call.exchange.usage_chunk(call.about, call.ordered))
        yield DONE
    except CallerLeft:
        return
    except SlotlineError as error:
        yield _error(error)
    except Exception:
        log.exception("a defect while streaming call %s", call.about.id)
        call.abandon()
        yield _error(InternalError("something went wrong on our side; the server's log has the details"))


def _openings(call: OpenCall) -> Iterator[bytes]:
    for number in range(call.choices):
        chunk = call.exchange.opening(call.about, number)
        if chunk is not None:
            yield _frame(chunk)


class Chunks:
    """The frames of a call's events."""

    def __init__(self, call: OpenCall) -> None:
        self._exchange, self._about, self._finals = call.exchange, call.about, call.finals
        self._around: dict[int, list[str]] = {}

    def frames(self, together: News) -> bytes:
        """Those of events that came together; there may be none."""
        return b"".join([self._frame(number, event) for number, event in together])

    def _frame(self, number: int, event: Event) -> bytes:
        if event.name == "token":
            plain = PLAIN_TOKEN.fullmatch(event.data)
            if plain is not None:
                return self._plain(number, plain[1])
            chunk = self._exchange.chunk(self._about, number, event.json())
            return b"" if chunk is None else _frame(chunk)
        if event.name == PROGRESS:
            return KEEP_ALIVE  # there is no chunk for it, and as long as it comes the stream is not silent
        if event.name == "gap":
            raise InternalError("a part of the answer was lost on its way here; the job's result has all of it")
        if event.is_terminal:
            return _frame(self._exchange.closing(self._about, number, self._finals[number]))
        return b""

    def _plain(self, number: int, text: str) -> bytes:
        """The frame of a token that adds `text`, a JSON string: between the two parts of one with another text."""
        if text == NO_TEXT:
            return b""
        if number not in self._around:
            marked = dumps(self._exchange.chunk(self._about, number, {"text": MARK}))
            self._around[number] = marked.split(dumps(MARK))
        before, after = self._around[number]
        return frame(before + text + after)


def _error(error: SlotlineError) -> bytes:
    return _frame({"error": error.to_dict()})


def _frame(data: dict[str, Any]) -> bytes:
    return frame(dumps(data))
