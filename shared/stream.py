"""A job's event log and its channel: append, replay, subscribe.

Both have the same name, `slotline:events:{id}`. The log is a Redis stream in which token i is entry
`(i+1)-0`; an event without an index after n tokens is `n-1`, `n-2`, … The order of the ids is the order of the
events. The channel carries `{"event", "id", "data"}` with the very `data` of the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from shared.lua import script
from shared.names import events_key, job_key
from shared.schemas import TERMINAL_EVENTS

#: Entries read from a log in one round trip.
PAGE = 1000


@dataclass(frozen=True, slots=True, order=True)
class EventId:
    """Place of an event in its log: number of tokens before it (or up to it), then a running number."""

    tokens: int
    step: int

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Read `"5-0"`."""
        tokens, _, step = text.partition("-")
        return cls(int(tokens), int(step))

    @classmethod
    def of_token(cls, index: int) -> EventId:
        """The entry of token `index`; index -1 is the place before the first token."""
        return cls(index + 1, 0)

    def __str__(self) -> str:
        return f"{self.tokens}-{self.step}"


START = EventId(0, 0)


@dataclass(frozen=True, slots=True)
class Event:
    """One event as logged. `data` is JSON text, passed on as it is."""

    id: EventId
    name: str
    data: str

    @property
    def index(self) -> int | None:
        """The index of a `token` event, otherwise None."""
        return self.id.tokens - 1 if self.id.step == 0 else None

    @property
    def is_terminal(self) -> bool:
        """Whether it is the last of its stream."""
        return self.name in TERMINAL_EVENTS

    def json(self) -> Any:
        """`data`, parsed."""
        return json.loads(self.data)

    @classmethod
    def from_message(cls, message: bytes | str) -> Event:
        """Read what the channel carries."""
        body = json.loads(message)
        return cls(EventId.parse(body["id"]), body["event"], dumps(body["data"]))

    @classmethod
    def from_entry(cls, entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
        """Read an entry of the log as `XRANGE` gives it."""
        entry_id, fields = entry
        return cls(EventId.parse(entry_id.decode()), fields[b"event"].decode(), fields[b"data"].decode())


@dataclass(frozen=True, slots=True)
class Append:
    """One event to write: whose it is, and where it goes (`5-0`, or `4-*` for the next without an index)."""

    job_id: str
    execution: str
    at: str
    name: str
    data: str


def dumps(data: Any) -> str:
    """JSON on one line, ASCII only: U+2028 and lone surrogates cannot break a frame."""
    return json.dumps(data, separators=(",", ":"))


class TokenStream:
    """Reads and writes the event logs of jobs."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self._append = script(client, "append")

    def append(self, events: Sequence[Append], client: Any = None) -> list[str]:
        """Write events of many jobs in one script call, in the given order.

        With a pipeline as `client` the call is only queued and the list is empty.
        Returns the ids of the jobs that have another owner now, whose events were refused. An index that is in the
        log already is success.
        """
        jobs = list(dict.fromkeys((e.job_id, e.execution) for e in events))
        number = {job: n for n, job in enumerate(jobs, 1)}
        keys = [key for job_id, _ in jobs for key in (job_key(job_id), events_key(job_id))]
        args: list[Any] = [execution for _, execution in jobs]
        for e in events:
            args += (number[e.job_id, e.execution], e.at, e.name, e.data)
        return [jobs[n - 1][0] for n in self._append(keys=keys, args=args)]

    def replay(self, job_id: str, after: EventId = START) -> Iterator[Event]:
        """The logged events later than `after`, in order, read page by page."""
        start = f"({after}"
        while True:
            entries = self.client.xrange(events_key(job_id), min=start, count=PAGE)
            for entry in entries:
                yield Event.from_entry(entry)
            if len(entries) < PAGE:
                return
            start = f"({entries[-1][0].decode()}"

    def last(self, job_id: str) -> Event | None:
        """The newest event, None where there is no log."""
        entries = self.client.xrevrange(events_key(job_id), count=1)
        return Event.from_entry(entries[0]) if entries else None

    def tokens(self, job_id: str) -> list[dict[str, Any]]:
        """The data of the token events so far."""
        return [event.json() for event in self.replay(job_id) if event.name == "token"]
