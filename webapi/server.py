"""Serving the app: gunicorn with gevent workers, set up for streams.

The order of a start: take the port, wait for Redis, fork. Nothing listens before Redis is there. The app and its
connections are made in each worker process, after gevent has patched the standard library.

The order of a stop, on SIGTERM or SIGINT: no new connections, the open streams end (their readers come back with
the id of their last event), running requests finish. A second SIGINT ends at once.
"""

from __future__ import annotations

import logging
import resource
import socket
import sys
from typing import Any, NoReturn

from flask import Flask
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter

from shared.connection import connect, wait_until_up
from shared.errors import RedisUnavailable
from shared.settings import WebSettings
from webapi import create_app
from webapi.stream_worker import StreamWorker

EXIT_CONFIGURATION = 2
EXIT_REDIS = 69

#: Connections beyond the streams. A gevent worker accepts no connection above its limit, it only stops answering.
SPARE_CONNECTIONS = 1000
#: Files a worker process has open besides its connections.
SPARE_FILES = 100
#: A worker whose event loop stands still this long is replaced. Streams may last for ever.
STALL_S = 60
GRACE_S = 10
#: An idle connection is kept longer than clients and proxies keep theirs, so that none closes just as it is used.
KEEP_CONNECTION_S = 75
BACKLOG = 2048

#: How a caller whose machine is gone without a word is noticed, within half a minute: silent connections are probed,
#: and what is sent has to be acknowledged. Accepted connections inherit these from the listener. Not every system has
#: every option.
PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


def run(settings: WebSettings) -> NoReturn:
    """Serve until told to stop; ends the process with status 0, 2 (the address) or 69 (Redis)."""
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(_address(settings)[0], socket.SOCK_STREAM) as listener:
        try:
            _take_port(listener, settings)
            _wait_for_redis(settings)
            _listen(listener, settings)
        except KeyboardInterrupt:
            raise SystemExit(0) from None
        _allow_files(settings.max_streams + SPARE_CONNECTIONS + SPARE_FILES)
        Server(settings, listener).run()
    raise SystemExit(0)


def _address(settings: WebSettings) -> tuple[socket.AddressFamily, Any]:
    """The configured address as the system knows it: family and socket address."""
    host = settings.host.strip("[]")
    try:
        found = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        _refuse_address(settings, error)
    return found[0][0], found[0][4]


def _take_port(listener: socket.socket, settings: WebSettings) -> None:
    """Bind without listening yet, so that a caller is refused rather than kept waiting while Redis is not there."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        listener.bind(_address(settings)[1])
    except OSError as error:
        _refuse_address(settings, error)


def _listen(listener: socket.socket, settings: WebSettings) -> None:
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        _refuse_address(settings, error)


def _refuse_address(settings: WebSettings, error: OSError) -> NoReturn:
    where = f"{settings.host}:{settings.port}"
    _end(
        EXIT_CONFIGURATION,
        f"cannot listen on {where}: {error.strerror}; "
        "stop what uses the port or choose another (--port, SLOTLINE_PORT; --host, SLOTLINE_HOST)",
    )


def _wait_for_redis(settings: WebSettings) -> None:
    client = connect(settings)
    try:
        wait_until_up(client, settings.redis_wait_s)
    except RedisUnavailable as error:
        _end(EXIT_REDIS, f"{error.message}; start Redis or give its address (--redis-url, SLOTLINE_REDIS_URL)")
    finally:
        client.close()


def _end(status: int, message: str) -> NoReturn:
    print(f"slotline web: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def _allow_files(needed: int) -> None:
    """Raise the soft limit of open files as far as we need and may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Foreman(Arbiter):  # type: ignore[misc]
    """gunicorn's master process, to which the first SIGINT is no reason to cut requests off."""

    handle_int = Arbiter.handle_term


class Server(BaseApplication):  # type: ignore[misc]
    """gunicorn's view of us. A BaseApplication, since an Application puts the current directory on `sys.path`."""

    def __init__(self, settings: WebSettings, listener: socket.socket) -> None:
        self.settings = settings
        host, self.port = listener.getsockname()[:2]
        self.host = f"[{host}]" if ":" in host else host
        self.file = listener.detach()
        super().__init__()

    def load_config(self) -> None:
        """Set every option we rely on; gunicorn's own files and variables are not read."""
        for name, value in self.options().items():
            self.cfg.set(name, value)

    def options(self) -> dict[str, Any]:
        """gunicorn's settings."""
        settings = self.settings
        return {
            "bind": [f"fd://{self.file}"],
            "backlog": BACKLOG,
            "workers": settings.web_workers,
            "worker_class": StreamWorker,
            "worker_connections": settings.max_streams + SPARE_CONNECTIONS,
            "timeout": STALL_S,
            "graceful_timeout": GRACE_S,
            "keepalive": KEEP_CONNECTION_S,
            "control_socket_disable": True,
            "proc_name": "slotline-web",
            "loglevel": "debug" if settings.log_level == "DEBUG" else "warning",
            "when_ready": lambda _: print(f"slotline web: listening on http://{self.host}:{self.port}", flush=True),
        }

    def load(self) -> Flask:
        """The app; gunicorn calls this in each worker process."""
        return create_app(self.settings)

    def run(self) -> None:
        """Serve until a signal ends it, and then the process."""
        Foreman(self).run()
