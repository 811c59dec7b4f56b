"""Whether those who wait for an answer are still there.

A write to a connection that the other side has closed succeeds once before the next one fails, and a call that
waits writes nothing, so the connections themselves are looked at.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from gevent.monkey import get_original

from webapi.ticker import Ticker

#: How often connections are looked at.
LOOK_S = 0.1

#: poll(2) itself, one system call for any number of connections that never waits here. gevent's stand-in does not
#: know the condition below.
poll = get_original("select", "poll")

#: The other side has closed its connection, or its direction of it, whatever it has sent before. Systems without
#: this condition say POLLHUP, which is always looked for.
CLOSED: int = getattr(select, "POLLRDHUP", 0)


def caller_is_gone(environ: dict[str, Any]) -> bool:
    """Whether the other side has closed its connection; False where that cannot be seen."""
    connection = connection_of(environ)
    if connection is None:
        return False
    poller = poll()
    poller.register(connection, CLOSED)
    return bool(poller.poll(0))


def connection_of(environ: dict[str, Any]) -> socket.socket | None:
    """The connection that a request came over; None where the server does not tell."""
    return environ.get("gunicorn.socket")


class Watch:
    """Looks at the connections of calls that wait, all of them together, on a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._poller = poll()
        self._left: dict[int, Callable[[], None]] = {}
        self._ticker = Ticker("callers", LOOK_S, self._look)

    def add(self, connection: socket.socket, left: Callable[[], None]) -> None:
        """Call `left` once when the other side of a connection has gone. It must not wait for anything."""
        with self._lock:
            self._left[connection.fileno()] = left
            self._poller.register(connection, CLOSED)
        self._ticker.enter()

    def remove(self, connection: socket.socket) -> None:
        """Look at a connection no more; call it before the connection is closed on our side."""
        with self._lock:
            if self._left.pop(connection.fileno(), None) is not None:
                self._poller.unregister(connection)
        self._ticker.leave()

    def close(self) -> None:
        """End the thread."""
        self._ticker.close()

    def _look(self) -> None:
        with self._lock:
            gone = [file for file, _ in self._poller.poll(0)]
            found = [self._left.pop(file) for file in gone]
            for file in gone:
                self._poller.unregister(file)
        for left in found:
            left()
