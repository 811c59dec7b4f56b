"""One reader's end of a job's channel: a bounded queue that says when it could not keep everything."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType

from shared.names import events_key
from shared.stream import Event

#: Events a reader may lag behind before it is sent back to the log.
QUEUE_LIMIT = 1000


class Notice(Enum):
    """What a reader is told when there is no event for it."""

    SILENCE = "nothing came in time"
    GAP = "something may have been missed: read the log"
    CLOSED = "the stream is to end: the server is stopping, or the caller has left"


class Inbox:
    """Where a reader waits, for one subscription or for any of several. It counts as one open stream."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._stirred: dict[Subscription, None] = {}

    def stir(self, subscription: Subscription) -> None:
        """Wake the reader; call it with `changed` held."""
        self._stirred[subscription] = None
        self.changed.notify()

    def wait(self, timeout_s: float) -> list[Subscription]:
        """Those that got something since the last call, in the order in which they did; none within `timeout_s`."""
        with self.changed:
            self.changed.wait_for(lambda: self._stirred, timeout_s)
            found, self._stirred = list(self._stirred), {}
        return found


class Subscription:
    """One reader's end of a job's channel. The hub's thread fills it, the reader empties it."""

    def __init__(self, job_id: str, leave: Callable[[Subscription], None], inbox: Inbox | None = None) -> None:
        self.channel = events_key(job_id)
        self.ready = threading.Event()
        self.inbox = inbox or Inbox()
        self._leave = leave
        self._changed = self.inbox.changed
        self._queue: deque[Event] = deque()
        self._gap = False
        self._closed = False

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def is_shut(self) -> bool:
        """Whether `get` gives `CLOSED` from now on."""
        return self._closed

    def get(self, timeout_s: float) -> Event | Notice:
        """The next event, or why there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._gap or self._closed, timeout_s)
            if self._closed:
                return Notice.CLOSED
            if self._gap:
                self._gap = False
                return Notice.GAP
            return self._queue.popleft() if self._queue else Notice.SILENCE

    def offer(self, event: Event) -> None:
        """Queue an event; a full queue is emptied and becomes a gap."""
        with self._changed:
            if len(self._queue) >= QUEUE_LIMIT:
                self._queue.clear()
                self._gap = True
            else:
                self._queue.append(event)
            self.inbox.stir(self)

    def confirm(self) -> None:
        """Redis has subscribed us: for the first time, or again after the connection was lost."""
        if not self.ready.is_set():
            self.ready.set()
            return
        with self._changed:
            self._queue.clear()
            self._gap = True
            self.inbox.stir(self)

    def shut(self) -> None:
        """End the reader's waiting for good, also that of one that is still being subscribed."""
        with self._changed:
            self._closed = True
            self.inbox.stir(self)
        self.ready.set()

    def close(self) -> None:
        """Leave; more than once is fine."""
        self._leave(self)
