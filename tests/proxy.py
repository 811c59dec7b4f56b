"""A TCP proxy in front of Redis that can swallow one reply, as a broken connection does."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from urllib.parse import urlparse


class DroppingProxy:
    """Passes bytes both ways. Once armed, the next request that holds a word is passed on, its reply is not, and
    the connection it came over is closed."""

    def __init__(self, redis_url: str) -> None:
        target = urlparse(redis_url)
        self._target = (target.hostname or "127.0.0.1", target.port or 6379)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._armed: bytes | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.dropped = 0

    def drop_next_reply_to(self, word: bytes) -> None:
        """Swallow the reply to the next request that holds `word`."""
        self._armed = word

    def __enter__(self) -> DroppingProxy:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            self._close(one)
        for thread in self._threads:
            thread.join(timeout=5)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._open |= {client, server}
            swallow = threading.Event()
            self._start(self._requests, client, server, swallow)
            self._start(self._replies, server, client, swallow)

    def _requests(self, client: socket.socket, server: socket.socket, swallow: threading.Event) -> None:
        while data := self._read(client):
            if self._armed is not None and self._armed in data:
                self._armed = None
                swallow.set()
            server.sendall(data)
        self._close(server)

    def _replies(self, server: socket.socket, client: socket.socket, swallow: threading.Event) -> None:
        while data := self._read(server):
            if swallow.is_set():
                self.dropped += 1
                break
            client.sendall(data)
        self._close(client)

    def _read(self, one: socket.socket) -> bytes:
        try:
            return one.recv(65_536)
        except OSError:
            return b""

    def _close(self, one: socket.socket) -> None:
        self._open.discard(one)
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was first
        finally:
            one.close()
