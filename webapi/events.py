"""`GET /v1/jobs/{id}/events`: a job's events as Server-Sent Events.

A frame's data is one line of ASCII JSON, so no text can break it. `token` and `gap` events have an index as their id,
the last event has the id `end`, and no other has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from flask import Response, request
from pydantic import Field

from shared.errors import InvalidRequest
from shared.results import (
    ErrorResponse,
    GapEvent,
    JobObject,
    PausedEvent,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
    TokenEvent,
)
from shared.stream import START, Event, EventId
from webapi.callers import caller_is_gone
from webapi.describe import Parameters, Query, blueprint, event_stream
from webapi.follow import Follower
from webapi.paths import JobPath, stored_job
from webapi.services import services
from webapi.sse import CONNECTED, HEADERS, KEEP_ALIVE, frame

bp = blueprint("events", "jobs")

#: The id of the last event. A reader that has it needs nothing more.
END = "end"
#: First in every stream: how soon a browser reconnects, and the first bytes at once.
HELLO = b"retry: 1000\n\n" + CONNECTED


INDEX = {"type": "string", "pattern": "^[0-9]+$"}
EVENTS = event_stream(
    bp,
    {
        "queued": QueuedEvent,
        "started": StartedEvent,
        "progress": ProgressEvent,
        "token": TokenEvent,
        "paused": PausedEvent,
        "resumed": StartedEvent,
        "gap": GapEvent,
        "done": JobObject,
        "failed": JobObject,
    },
    {"token": INDEX, "gap": INDEX, "done": {"const": END}, "failed": {"const": END}},
)


class EventsQuery(Query):
    """Where a returning reader goes on."""

    after: str | None = Field(
        None, description="Index of the last token the reader has, or `end`. Equals the header `Last-Event-ID`."
    )


class EventsHeader(Parameters):
    """What a browser sends when it reconnects."""

    last_event_id: str | None = Field(None, alias="Last-Event-ID", description="Id of the last event the reader has.")


@bp.get(
    "/v1/jobs/<job_id>/events",
    summary="Follow a job",
    responses={200: EVENTS, 204: None, 404: ErrorResponse},
)
def job_events(path: JobPath, header: EventsHeader, query: EventsQuery) -> Response:
    """Every event of the job from its start, or after the reader's last one, until its end.

    Of `after` and `Last-Event-ID` the further one counts: a browser repeats the address it was given and adds the
    header when it reconnects. With `end` the answer is 204, which stops an EventSource.
    """
    given = services()
    record = stored_job(path)
    place = max(read_place(query.after, "after"), read_place(header.last_event_id, "Last-Event-ID"))
    if place == PAST_END:
        return _without_body(204)
    if request.method == "HEAD":
        return _without_body(200)
    subscription = given.hub.open(record.id)
    response = Response(content_type="text/event-stream", headers=HEADERS)
    response.call_on_close(subscription.close)
    given.waiting.enter(record)
    response.call_on_close(partial(given.waiting.leave, record))
    follower = Follower(given.store, subscription, record, place)
    gone = partial(caller_is_gone, request.environ)
    response.response = stream_frames(follower.events(given.settings.keep_alive_s), gone)
    return response


PAST_END = EventId(2**63, 0)


def read_place(text: str | None, name: str) -> EventId:
    """The place in the log that `after` or `Last-Event-ID` means.

    Raises:
        InvalidRequest: it is neither an index nor `end`.
    """
    if not text:
        return START
    if text == END:
        return PAST_END
    if not re.fullmatch("-1|[0-9]{1,10}", text):
        raise InvalidRequest(f"`{name}` must be the index of a token or `{END}`, not {text[:40]!r}", name)
    return EventId.of_token(int(text))


def stream_frames(events: Iterator[list[Event]], gone: Callable[[], bool]) -> Iterator[bytes]:
    """The stream as bytes, events that came together in one piece.

    Ends when the job does, or at a keep-alive that finds the reader gone.
    """
    yield HELLO
    for together in events:
        if together:
            yield b"".join(map(event_frame, together))
        elif gone():
            return
        else:
            yield KEEP_ALIVE


def event_frame(event: Event) -> bytes:
    """One event as a frame."""
    return frame(event.data, event.name, END if event.is_terminal else event.index)


def _without_body(status: int) -> Response:
    response = Response(status=status, content_type="text/event-stream", headers=HEADERS)
    if status == 204:
        del response.headers["Content-Type"]
    return response
