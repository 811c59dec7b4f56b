"""One reader's end of a job's channel: a bounded queue that says when it could not keep everything."""

from __future__ import annotations

import queue
import threading
import time
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
        # By its module: gevent puts its own in place, after this module was imported.
        self._stirred: queue.SimpleQueue[Subscription] = queue.SimpleQueue()

    def stir(self, subscription: Subscription) -> None:
        """Wake the reader; a subscription is in line once, however much it has got."""
        if not subscription.stirred:
            subscription.stirred = True
            self._stirred.put(subscription)

    def wait(self, timeout_s: float) -> list[Subscription]:
        """Those that got something since the last call, in the order in which they did; none within `timeout_s`."""
        try:
            found = [self._stirred.get(timeout_s > 0, timeout_s)]
        except queue.Empty:
            return []
        while not self._stirred.empty():
            found.append(self._stirred.get())
        for subscription in found:
            subscription.stirred = False
        return found


class Subscription:
    """One reader's end of a job's channel. The hub's thread fills it, the reader empties it.

    Without locks, since every token goes through it: whatever the hub adds, it adds before it stirs the inbox, and a
    reader that was woken is put in line again by all that is added from then on.

    Attributes:
        stirred: whether it is in the line of its inbox.
    """

    def __init__(self, job_id: str, leave: Callable[[Subscription], None], inbox: Inbox | None = None) -> None:
        self.channel = events_key(job_id)
        self.ready = threading.Event()
        self.inbox = inbox or Inbox()
        self.stirred = False
        self._leave = leave
        self._queue: deque[Event] = deque()
        self._gap = False
        self._closed = False

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def is_shut(self) -> bool:
        """Whether `take` gives `CLOSED` from now on."""
        return self._closed

    def take(self) -> Event | Notice:
        """The next event, or why there is none, without waiting."""
        if self._closed:
            return Notice.CLOSED
        if self._gap:
            self._gap = False
            return Notice.GAP
        events = self._queue
        return events.popleft() if events else Notice.SILENCE

    def get(self, timeout_s: float) -> Event | Notice:
        """The next event, or why there is none within `timeout_s`. For a reader of one subscription."""
        deadline = time.monotonic() + timeout_s
        while (got := self.take()) is Notice.SILENCE and self.inbox.wait(deadline - time.monotonic()):
            pass
        return got

    def offer(self, event: Event) -> None:
        """Queue an event; a full queue is emptied and becomes a gap."""
        if len(self._queue) >= QUEUE_LIMIT:
            self._lose()
        else:
            self._queue.append(event)
        self.inbox.stir(self)

    def confirm(self) -> None:
        """Redis has subscribed us: for the first time, or again after the connection was lost."""
        if not self.ready.is_set():
            self.ready.set()
            return
        self._lose()
        self.inbox.stir(self)

    def shut(self) -> None:
        """End the reader's waiting for good, also that of one that is still being subscribed."""
        self._closed = True
        self.inbox.stir(self)
        self.ready.set()

    def close(self) -> None:
        """Leave; more than once is fine."""
        self._leave(self)

    def _lose(self) -> None:
        self._queue = deque()  # a new one: the reader may be at the old one just now
        self._gap = True
