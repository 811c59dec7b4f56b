"""A strict reader of Server-Sent Events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    """One block of a stream: an event, or what else stands between two blank lines."""

    event: str | None = None
    id: str | None = None
    data: str | None = None
    retry: str | None = None
    comment: str | None = None

    def json(self) -> Any:
        return json.loads(self.data or "")


def frames(chunks: Iterable[bytes]) -> Iterator[Frame]:
    """The blocks of a stream as they come. Refuses anything that is not one field a line."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        while b"\n\n" in rest:
            block, rest = rest.split(b"\n\n", 1)
            yield _frame(block.decode("ascii"))
    assert rest == b"", "the stream ended within a frame"


def events(chunks: Iterable[bytes]) -> Iterator[Frame]:
    """The events alone."""
    return (frame for frame in frames(chunks) if frame.event is not None)


def _frame(block: str) -> Frame:
    fields: dict[str, str] = {}
    for line in block.splitlines():
        name, colon, value = line.partition(":")
        assert colon and name in ("", "event", "id", "data", "retry"), line
        assert (name or "comment") not in fields, f"{name} twice in one frame"
        fields[name or "comment"] = value.removeprefix(" ")
    return Frame(**fields)
