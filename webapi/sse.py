"""Server-Sent Events: frames, and the headers that keep proxies from holding them back."""

from __future__ import annotations

HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}

#: A comment that makes the headers go out at once, and one that keeps a silent connection open.
CONNECTED = b": connected\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

#: The last frame of a stream of chunks that went well. *Source:* OpenAI's API reference, streaming.
DONE = b"data: [DONE]\n\n"


def frame(data: str, event: str | None = None, event_id: str | int | None = None) -> bytes:
    """One frame. `data` is one line of ASCII, which JSON from `shared.stream.dumps` always is."""
    lines = []
    if event is not None:
        lines.append(f"event: {event}")
    if event_id is not None:
        lines.append(f"id: {event_id}")
    return "\n".join([*lines, f"data: {data}", "", ""]).encode("ascii")
