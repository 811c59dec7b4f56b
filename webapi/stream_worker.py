"""The gunicorn worker: gevent's, made to stop soon and to speak JSON."""

from __future__ import annotations

import json
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import gevent
from flask import Flask
from gevent.monkey import MonkeyPatchWarning
from gunicorn.http import errors as http_errors
from gunicorn.workers.ggevent import GeventWorker

from shared.errors import InternalError, InvalidRequest
from webapi.services import services_of


class StreamWorker(GeventWorker):  # type: ignore[misc]
    """A gevent worker that ends its streams when it is told to stop, and whose own errors are JSON too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: dict[gevent.Greenlet, gevent.Timeout] = {}

    def patch(self) -> None:
        """Patch the standard library; runs in the worker process, before the app is made."""
        with warnings.catch_warnings():
            # redis.asyncio, which nothing here uses, has imported names of ssl by then.
            warnings.simplefilter("ignore", MonkeyPatchWarning)
            super().patch()

    def init_signals(self) -> None:
        """SIGINT, which a terminal sends to every process, stops as gently as SIGTERM."""
        super().init_signals()
        signal.signal(signal.SIGINT, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop taking connections; the rest is no work for a signal handler."""
        super().handle_exit(sig, frame)
        gevent.spawn(self._end_streams)
        gevent.spawn(self._end_idle)

    def _end_streams(self) -> None:
        app: Flask | None = getattr(self, "wsgi", None)
        if app is not None:
            services_of(app).webhooks.stop()
            services_of(app).hub.close()

    def _end_idle(self) -> None:
        """Let go of the connections that only wait for a next request."""
        for greenlet, limit in list(self._idle.items()):
            greenlet.kill(limit, block=False)

    @contextmanager
    def timeout_ctx(self) -> Iterator[None]:
        """Bounds how long a connection is kept for its next request; once stopping, not at all."""
        greenlet = gevent.getcurrent()
        with gevent.Timeout(self.cfg.keepalive if self.alive else 0.01, False) as limit:
            self._idle[greenlet] = limit
            try:
                yield
            finally:
                del self._idle[greenlet]

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        """Answer what never reached the app: gunicorn would send a page of HTML."""
        status = _parse_status(exc)
        if status == 500:
            self.log.error("error while handling a request", exc_info=exc)
            error = InternalError("something went wrong on our side; the server's log has the details").to_dict()
        else:
            error = InvalidRequest(f"the HTTP request cannot be read: {exc}").to_dict() | {"code": "bad_http_request"}
        payload = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} \r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        try:
            client.sendall(head.encode() + payload)
        except OSError:
            self.log.debug("the caller left before its error was sent")


def _parse_status(error: BaseException) -> int:
    """The HTTP status for what gunicorn could not parse."""
    if isinstance(error, http_errors.LimitRequestLine):
        return 414
    if isinstance(error, http_errors.LimitRequestHeaders):
        return 431
    if isinstance(error, http_errors.ExpectationFailed):
        return 417
    if isinstance(error, http_errors.UnsupportedTransferCoding):
        return 501
    return 400 if isinstance(error, http_errors.ParseException) else 500
