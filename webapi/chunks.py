"""A call's answer as a stream of chunks.

Every frame is `data:` and one line of JSON. The stream ends with `[DONE]`, or with one frame `{"error": …}` and
without it, so that a failure never looks like an end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from shared.errors import InternalError, SlotlineError
from shared.stream import Event, dumps
from webapi.calls import CallerLeft, OpenCall
from webapi.sse import CONNECTED, DONE, KEEP_ALIVE, frame

log = logging.getLogger(__name__)


def chunk_frames(call: OpenCall) -> Iterator[bytes]:
    """The whole stream, its first bytes at once."""
    try:
        yield CONNECTED + b"".join(_openings(call))
        for got in call.news():
            frames = KEEP_ALIVE if got is None else b"".join(_frames_of(call, *got))
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


def _frames_of(call: OpenCall, number: int, event: Event) -> Iterator[bytes]:
    if event.name == "token":
        chunk = call.exchange.chunk(call.about, number, event.json())
        if chunk is not None:
            yield _frame(chunk)
    elif event.is_terminal:
        yield _frame(call.exchange.closing(call.about, number, call.finals[number]))


def _error(error: SlotlineError) -> bytes:
    return _frame({"error": error.to_dict()})


def _frame(data: dict[str, Any]) -> bytes:
    return frame(dumps(data))
