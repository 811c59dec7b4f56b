"""Follows the events of one job over as many connections as it takes."""

from __future__ import annotations

import queue
from collections import deque

from slotline.errors import ApiError, ConnectionFailed, ProtocolError
from slotline.reader import EventReader
from slotline.sse import SseEvent
from slotline.transport import Transport, job_path

#: How long a server that has gone away is looked for.
RECONNECT_S = 30.0

#: Longest wait between two tries.
MAX_BACKOFF_S = 2.0

#: Answers of a server, or of a proxy before it, that will pass.
PASSING = (429, 502, 503, 504)


class Follower:
    """The events of a job, each token once and in order, or a `gap` in place of those that the server has lost.

    It is used by one thread and must be closed.
    """

    def __init__(self, transport: Transport, job_id: str, after: int = -1) -> None:
        self._transport = transport
        self._job_id = job_id
        self._next_index = after + 1
        self._reader: EventReader | None = None
        self._ready: deque[SseEvent] = deque()
        self._was_connected = False
        self._alive_at = transport.clock()
        self._failures = 0
        self._gaps = 0

    def next(self, deadline: float | None) -> SseEvent:
        """Wait for the next event until `deadline`, on the transport's clock.

        Raises:
            TimeoutError: it has passed.
            ApiError: the server refuses, for instance because the job was erased.
            ConnectionFailed: the server was away for `RECONNECT_S`, or not there at the start.
        """
        while not self._ready:
            if self._reader is None:
                self._connect(deadline)
            else:
                self._receive(self._reader, deadline)
        return self._ready.popleft()

    def close(self) -> None:
        """Leave the stream. The job does not notice."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _connect(self, deadline: float | None) -> None:
        last_id = str(self._next_index - 1) if self._next_index else None
        try:
            self._reader = self._transport.open_events(
                f"{job_path(self._job_id)}/events", last_id, self._left_s(deadline)
            )
        except (ApiError, ConnectionFailed) as failure:
            self._bear(failure, deadline)
        else:
            self._was_connected = True

    def _bear(self, failure: ApiError | ConnectionFailed, deadline: float | None) -> None:
        """Wait before the next try, or raise if there is to be none."""
        if isinstance(failure, ApiError) and failure.status not in PASSING:
            raise failure
        if isinstance(failure, ConnectionFailed):
            failure.job_id = self._job_id
            if not self._was_connected:
                raise failure
        now = self._transport.clock()
        if now - self._alive_at >= RECONNECT_S:
            raise failure
        self._failures += 1
        wait_s = min(0.05 * 2**self._failures, MAX_BACKOFF_S)
        if isinstance(failure, ApiError) and failure.retry_after_s is not None:
            wait_s = max(wait_s, min(failure.retry_after_s, RECONNECT_S))
        if deadline is not None and now + wait_s >= deadline:
            self._transport.sleep(max(0.0, deadline - now))
            raise TimeoutError
        self._transport.sleep(wait_s)

    def _receive(self, reader: EventReader, deadline: float | None) -> None:
        try:
            events = reader.get(self._left_s(deadline))
        except queue.Empty:
            raise TimeoutError from None
        if events is None:
            self.close()
            lost = ConnectionFailed(f"the event stream of {self._transport.url} ended too soon", self._transport.url)
            self._bear(lost, deadline)
            return
        self._alive_at = self._transport.clock()
        for event in events:
            if not self._take(event):
                self.close()
                return

    def _left_s(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._transport.clock())

    def _take(self, event: SseEvent) -> bool:
        """Keep an event unless it was seen before; False if one before it is missing."""
        if event.name == "token":
            index = _index(event)
            if index > self._next_index:
                return self._gap(index)
            if index < self._next_index:
                return True
            self._next_index += 1
            self._gaps = 0
        elif event.name == "gap":
            # The server has the tokens up to there no more; what it has of them comes with the event.
            self._next_index = max(self._next_index, event.json()["tokens"])
        self._failures = 0
        self._ready.append(event)
        return True

    def _gap(self, index: int) -> bool:
        """A hole is read again from a new connection; twice the same is the server's fault."""
        self._gaps += 1
        if self._gaps > 1:
            raise ProtocolError(f"job {self._job_id}: token {self._next_index} is missing before token {index}")
        return False


def _index(event: SseEvent) -> int:
    try:
        return int(event.id)
    except ValueError:
        raise ProtocolError(f"a token event has the id {event.id!r}") from None
