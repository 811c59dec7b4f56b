"""A small HTTP server on this machine that takes webhooks and answers as it is told.

with Receiver(500, 500, 200) as receiver:
    ...  # send to receiver.url
    assert [got.status for got in receiver.got] == [500, 500, 200]
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Got:
    """A request, and the status it was answered with."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


class Receiver:
    """Answers with each status in turn, then with the last one again; a path that begins with `/hang` gets no answer.

    Attributes:
        url: where it listens.
        got: the requests that were answered, and those of which one waits for an answer with the status 0.
    """

    def __init__(self, *statuses: int, location: str = "") -> None:
        self._statuses = list(statuses) or [200]
        self._location = location
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.got: list[Got] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver._note(self.path, dict(self.headers), body)
                if status == 0:
                    receiver._closing.wait()
                    return
                self.send_response(status)
                if receiver._location:
                    self.send_header("Location", receiver._location)
                self.send_header("Set-Cookie", "seen=1")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02], name="receiver")

    def of(self, path: str) -> list[Got]:
        """What came to one path."""
        with self._lock:
            return [got for got in self.got if got.path == path]

    def _note(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        with self._lock:
            if path.startswith("/hang"):
                status = 0
            else:
                status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
            self.got.append(Got(path, headers, body, status))
            return status

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
