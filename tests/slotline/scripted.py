"""A real HTTP server on a real socket that answers as the test says and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[["Handler"], None]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    server: ScriptedServer
    body: Any

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(size)
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        self.body = json.loads(raw) if raw and is_json else raw or None
        self.server.asked.append(Asked(self.command, self.path, dict(self.headers), self.body))
        self.server.reply_for(self.command, self.path)(self)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *args: Any) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def drop(self) -> None:
        """End the connection as a crash does, without another word."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reader_left(self) -> bool:
        """Wait until the other side has closed the connection."""
        self.connection.settimeout(10)
        return self.connection.recv(1) == b""


class ScriptedServer(ThreadingHTTPServer):
    """Replies are used up in order; the last one of an address stays."""

    daemon_threads = False
    block_on_close = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Asked] = []
        self._replies: dict[tuple[str, str], deque[Reply]] = defaultdict(deque)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def on(self, method: str, path: str, *replies: Reply) -> None:
        self._replies[method, path].extend(replies)

    def reply_for(self, method: str, path: str) -> Reply:
        replies = self._replies[method, path.partition("?")[0]]
        if not replies:
            return answer(error(404, "not_found", f"there is nothing at {path}"), 404)
        return replies.popleft() if len(replies) > 1 else replies[0]

    def asked_for(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.path.partition("?")[0] == path]

    def handle_error(self, request: Any, address: Any) -> None:
        pass  # a client that leaves in the middle is what many tests are about


def answer(body: Any, status: int = 200, content_type: str = "application/json", **headers: str) -> Reply:
    """One answer, after which the connection stays open."""

    def reply(handler: Handler) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.write(data)

    return reply


def lost(handler: Handler) -> None:
    """The request has arrived, but its answer is lost."""
    handler.drop()


def events(*parts: bytes | Reply, then: Reply | None = None) -> Reply:
    """An event stream: bytes are sent as they are, functions are called in between; then the connection ends."""

    def reply(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        for part in parts:
            handler.write(part) if isinstance(part, bytes) else part(handler)
        if then is not None:
            then(handler)
        handler.close_connection = True

    return reply


def frame(name: str, data: Any, event_id: str | None = None) -> bytes:
    lines = [f"event: {name}", *([f"id: {event_id}"] if event_id is not None else []), f"data: {json.dumps(data)}"]
    return "\n".join([*lines, "", ""]).encode()


def token(index: int, text: str | None = None) -> bytes:
    return frame(
        "token", {"index": index, "text": f"t{index} " if text is None else text, "token": 100 + index}, str(index)
    )


STARTED = frame("started", {"attempt": 1})
COMMENT = b": keep-alive\n\n"


def job(status: str = "completed", **fields: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": "job1",
        "object": "job",
        "model": "m",
        "status": status,
        "detail": status,
        "priority": "normal",
        "created_at": 1_700_000_000.0,
        "text": "t0 t1 " if status == "completed" else None,
        "finish_reason": "stop" if status == "completed" else None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 0},
        "timings": None,
        "seed": 7,
        "error": None,
        "links": {},
    }
    return shown | fields


def done(**fields: Any) -> bytes:
    return frame("done", job(**fields), "end")


def error(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": f"kind_{status}", "code": code, "param": param}}
