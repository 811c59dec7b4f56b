"""A job's event log and its channel: append, replay, subscribe.

Both have the same name, `slotline:events:{id}`. The log is a Redis stream in which token i is entry
`(i+1)-0`; an event without an index after n tokens is `n-1`, `n-2`, … The order of the ids is the order of the
events. The channel carries `{"event", "id", "data"}` with the very `data` of the log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

import redis
from redis.exceptions import RedisError

from shared.lua import script
from shared.names import events_key, job_key
from shared.schemas import TERMINAL_EVENTS

#: How long the log of a job that is gone can still be read.
LAST_LOOK_S = 60
#: Entries read from a log in one round trip.
PAGE = 1000


class EventId(NamedTuple):
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

#: What the channel carries, as `append.lua` and `commit.lua` put it together.
_MESSAGE = re.compile(rb'\{"event":"(\w+)","id":"(\d+)-(\d+)","data":(\{.*\})\}', re.DOTALL)

#: The id of what goes out on the channel alone. It takes no place among the events of the log.
UNLOGGED = START

#: Unlogged: a job's record and log are gone, so readers should look at the record.
REMOVED = "removed"
#: Unlogged: how a job is coming on that has said nothing for a while.
QUEUED, PROGRESS = "queued", "progress"


@dataclass(frozen=True, slots=True)
class Event:
    """One event as logged. `data` is JSON text, passed on as it is."""

    id: EventId
    name: str
    data: str

    @property
    def index(self) -> int | None:
        """The index of a `token` event, or of the last token that a `gap` stands for; None of any other."""
        tokens, step = self.id
        return tokens - 1 if step == 0 and tokens else None

    @property
    def is_terminal(self) -> bool:
        """Whether it is the last of its stream."""
        return self.name in TERMINAL_EVENTS

    def json(self) -> Any:
        """`data`, parsed."""
        return json.loads(self.data)

    @classmethod
    def from_message(cls, message: bytes) -> Event:
        """Read what the channel carries. Every token goes through here, so its data stays the text that it is.

        Raises:
            ValueError: it is not what our scripts publish.
        """
        found = _MESSAGE.fullmatch(message)
        if found is None:
            raise ValueError(f"no event: {message[:80]!r}")
        name, tokens, step, data = found.groups()
        return cls(EventId(int(tokens), int(step)), name.decode(), data.decode())

    @classmethod
    def from_entry(cls, entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
        """Read an entry of the log as `XRANGE` gives it."""
        entry_id, fields = entry
        return cls(EventId.parse(entry_id.decode()), fields[b"event"].decode(), fields[b"data"].decode())


@dataclass(frozen=True, slots=True)
class Append:
    """One event to write: whose it is, and where it goes.

    That is `5-0`, or `4-*` for the next without an index, or nowhere (empty): it goes out on the channel alone.
    """

    job_id: str
    execution: str
    at: str
    name: str
    data: str


_encode = json.JSONEncoder(separators=(",", ":")).encode


def dumps(data: Any) -> str:
    """JSON on one line, ASCII only: U+2028 and lone surrogates cannot break a frame."""
    return _encode(data)


def token_data(index: int, text: str, token: int | None) -> str:
    """The data of a token that has no more than text, as `dumps` would write it and several times as fast."""
    return f'{{"index":{index},"text":{encode_basestring_ascii(text)},"token":{"null" if token is None else token}}}'


@dataclass(frozen=True, slots=True)
class AppendCall:
    """The keys and arguments of one `append` script call."""

    jobs: list[tuple[str, str]]
    keys: list[str]
    args: list[Any]

    @classmethod
    def of(cls, events: Sequence[Append]) -> AppendCall:
        """One call for events of many jobs, in the given order."""
        jobs = list(dict.fromkeys((e.job_id, e.execution) for e in events))
        number = {job: n for n, job in enumerate(jobs, 1)}
        keys = [key for job_id, _ in jobs for key in (job_key(job_id), events_key(job_id))]
        args: list[Any] = [execution for _, execution in jobs]
        for e in events:
            args += (number[e.job_id, e.execution], e.at, e.name, e.data)
        return cls(jobs, keys, args)

    def refused(self, reply: Sequence[int]) -> list[str]:
        """The execution ids whose events the script refused."""
        return [self.jobs[n - 1][1] for n in reply]


class TokenStream:
    """Reads and writes the event logs of jobs."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self._append = script(client, "append")

    @property
    def append_sha(self) -> str:
        """The name of the `append` script in Redis."""
        return str(self._append.sha)

    def append(self, events: Sequence[Append]) -> list[str]:
        """Write events of many jobs in one script call, in the given order.

        Returns the execution ids that own their job no more, whose events were refused. An index that is in the
        log already is success.
        """
        call = AppendCall.of(events)
        return call.refused(self._append(keys=call.keys, args=call.args))

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

    def say_removed(self, job_id: str) -> None:
        """Tell readers that the job is gone."""
        self.client.publish(events_key(job_id), dumps({"event": REMOVED, "id": str(UNLOGGED), "data": {}}))

    def let_go(self, job_ids: Sequence[str]) -> None:
        """Let the logs of jobs that are gone expire, if they do not yet, and tell readers of those that have one."""
        pipe = self.client.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.expire(events_key(job_id), LAST_LOOK_S, lt=True)
        for job_id, has_log in zip(job_ids, pipe.execute(), strict=True):
            if has_log:
                self.say_removed(job_id)

    def tokens(self, job_id: str) -> list[dict[str, Any]]:
        """The data of the token events so far."""
        return [event.json() for event in self.replay(job_id) if event.name == "token"]


class EventWriter:
    """Appends events over a connection of its own and does not wait: each reply is read before the next call.

    A worker writes once a tick, and waiting for the reply would wake its publisher once more in every tick, on
    cores that the model needs. What goes wrong is mended when it is noticed, by sending the events again. One thread
    only.
    """

    def __init__(self, client: redis.Redis, stream: TokenStream) -> None:
        self._pool: Any = client.connection_pool
        self._connection: Any = None
        self._stream = stream
        self._sha = stream.append_sha
        self._in_flight: tuple[Sequence[Append], AppendCall] | None = None
        self._sent = False

    @property
    def is_waiting(self) -> bool:
        """Whether the reply to the last call is still to be read."""
        return self._in_flight is not None

    def send(self, events: Sequence[Append]) -> list[str]:
        """Write events. Returns the execution ids that the call before this one was refused for.

        Raises:
            RedisError: the events of the call before are not written; call again with the same events.
        """
        refused = self.settle()
        call = AppendCall.of(events)
        self._in_flight = events, call
        try:
            if self._connection is None:
                self._connection = self._pool.get_connection()
            self._connection.send_command("EVALSHA", self._sha, len(call.keys), *call.keys, *call.args)
            self._sent = True
        except RedisError:
            self._reset()
        return refused

    def settle(self) -> list[str]:
        """Wait until all that was sent is written; returns as `send`.

        Raises:
            RedisError: it is not written; call again.
        """
        if self._in_flight is None:
            return []
        (events, call), reply = self._in_flight, None
        if self._sent:
            try:
                reply = self._connection.read_response()
            except RedisError:
                self._reset()
        refused = self._stream.append(events) if reply is None else call.refused(reply)
        self._in_flight, self._sent = None, False
        return refused

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._pool.release(self._connection)
            self._connection = None

    def _reset(self) -> None:
        """A reply may still be on its way on the old connection, so that one is not used again."""
        self._sent = False
        if self._connection is not None:
            self._connection.disconnect()
            self._pool.release(self._connection)
            self._connection = None
