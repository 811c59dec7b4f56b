"""Reads one event stream in a thread of its own.

httpx fixes the time limit of a read when the request is sent, but how long we may wait for the next event
changes with each event. So a thread reads, and whoever waits takes from a queue with the limit of the moment.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from queue import SimpleQueue

import httpx

from slotline.sse import SseEvent, SseParser


class EventReader:
    """The events of one connection. It is used by one thread and must be closed."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces: SimpleQueue[list[SseEvent] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="slotline-events", daemon=True)
        self._thread.start()

    def get(self, wait_s: float | None) -> list[SseEvent] | None:
        """The events of the next piece of the stream, none for a comment; None once the connection has ended.

        Raises:
            queue.Empty: nothing came within `wait_s`.
        """
        return self._pieces.get(timeout=wait_s)

    def close(self) -> None:
        """Give the connection up, also in the middle of a read, and wait for the thread."""
        if self._thread.is_alive():
            stream = self._response.extensions.get("network_stream")
            sock = stream.get_extra_info("socket") if stream is not None else None
            if isinstance(sock, socket.socket):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)

    def _read(self) -> None:
        parser = SseParser()
        try:
            for chunk in self._response.iter_bytes():
                self._pieces.put(parser.feed(chunk))
        except Exception:  # noqa: BLE001, S110 - however the connection broke, the one remedy is a new one
            pass
        finally:
            with suppress(Exception):
                self._response.close()
            self._pieces.put(None)
