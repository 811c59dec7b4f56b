"""A TCP proxy in front of Redis that does to connections what networks and failovers do.

with RedisProxy(valkey_url) as proxy:
    client = redis.Redis.from_url(proxy.url)
    proxy.drop_next_reply_to(b"word")  # the request arrives, its reply does not
    proxy.cut()      # all connections are closed, new ones refused
    proxy.freeze()   # connections are made and stay open, but no byte passes
    proxy.heal()     # all is well again; what was held back by a freeze is passed on
    proxy.aim(other_url)  # from here on connections go to another server
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from urllib.parse import urlparse

HOST = "127.0.0.1"


class RedisProxy:
    """Passes bytes both ways until told otherwise. Every method may be called from any thread.

    Attributes:
        url: where it listens, the same for its whole life.
        dropped: how many replies were swallowed.
    """

    def __init__(self, redis_url: str) -> None:
        self._target = _address(redis_url)
        # The port stays ours while nobody listens: else a client that is refused might be given it for itself.
        self._port = _bound(0)
        self.url = f"redis://{HOST}:{self._number}"
        self.dropped = 0
        self._armed: bytes | None = None
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def drop_next_reply_to(self, word: bytes) -> None:
        """Swallow the reply to the next request that holds `word`, and close the connection it came over."""
        self._armed = word

    def cut(self) -> None:
        """Close all connections and refuse new ones until `heal`."""
        with self._lock:
            listener, self._listener = self._listener, None
            if listener is not None:
                _close(listener)
        self._close_all()

    def freeze(self) -> None:
        """Let no byte pass in either direction until `heal`, as a network does that loses every packet."""
        self._flowing.clear()

    def heal(self) -> None:
        """Accept connections and let bytes pass, those of a freeze included."""
        with self._lock:
            if self._listener is None:
                self._listener = _bound(self._number)
                self._listener.listen(128)
                self._start(self._accept, self._listener)
        self._flowing.set()

    def aim(self, redis_url: str) -> None:
        """Send connections to another server, as a failover does. Those to the one before are closed."""
        self._target = _address(redis_url)
        self._close_all()

    def __enter__(self) -> RedisProxy:
        self.heal()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.cut()
        self._flowing.set()
        for thread in self._threads:
            thread.join(timeout=5)
        self._close_all()  # those that were made while the first ones were closed
        self._port.close()

    @property
    def _number(self) -> int:
        return int(self._port.getsockname()[1])

    def _start(self, run: Callable[..., None], *args: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:  # there is no server now, and whoever asked notices that
                _close(client)
                continue
            server.settimeout(None)
            with self._lock:
                if self._listener is not listener:  # cut since it was accepted
                    _close(client)
                    _close(server)
                    return
                self._open |= {client, server}
                swallow = threading.Event()
                self._start(self._requests, client, server, swallow)
                self._start(self._replies, server, client, swallow)

    def _requests(self, client: socket.socket, server: socket.socket, swallow: threading.Event) -> None:
        while data := _read(client):
            armed = self._armed
            if armed is not None and armed in data:
                self._armed = None
                swallow.set()
            if not self._pass_on(server, data):
                break
        self._end(client, server)

    def _replies(self, server: socket.socket, client: socket.socket, swallow: threading.Event) -> None:
        while data := _read(server):
            if swallow.is_set():
                self.dropped += 1
                break
            if not self._pass_on(client, data):
                break
        self._end(client, server)

    def _pass_on(self, to: socket.socket, data: bytes) -> bool:
        self._flowing.wait()
        try:
            to.sendall(data)
        except OSError:
            return False
        return True

    def _close_all(self) -> None:
        with self._lock:
            self._end_locked(*self._open)

    def _end(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._end_locked(*sockets)

    def _end_locked(self, *sockets: socket.socket) -> None:
        for one in sockets:
            if one in self._open:
                self._open.discard(one)
                _close(one)


def _address(redis_url: str) -> tuple[str, int]:
    target = urlparse(redis_url)
    return target.hostname or HOST, target.port or 6379


def _bound(port: int) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((HOST, port))
    return one


def _read(one: socket.socket) -> bytes:
    try:
        return one.recv(65_536)
    except OSError:
        return b""


def _close(one: socket.socket) -> None:
    """Close at once; that the other side was first is no matter."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        one.close()
