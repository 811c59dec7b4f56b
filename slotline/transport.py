"""One HTTP exchange with the server: time limits, safe repeats, and errors as exceptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit
from weakref import WeakSet

import httpx

from slotline import __version__
from slotline.answers import api_error, check_events, json_of
from slotline.errors import ApiError, ConnectionFailed
from slotline.reader import EventReader

#: Times one request is sent at most: the answer may be lost, or ask to come back later.
ATTEMPTS = 5

#: Wait before a request whose answer was lost is sent again; doubled each time.
BACKOFF_S = 0.1

CONNECT_S = 5.0

#: The server writes at least a comment every 15 s; a stream silent for longer than this is dead.
SILENCE_S = 45.0

#: Answers that ask to come back later.
BUSY = (429, 503)


class Transport:
    """Sends requests to one server. May be shared by threads.

    Every request it sends may be sent twice without harm: reads, cancels, and submits, which carry a key.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = _checked(base_url)
        self.timeout_s = timeout_s
        self.sleep = sleep
        self.clock = clock
        #: What reads event streams now, to be closed with the rest.
        self.readers: WeakSet[EventReader] = WeakSet()
        self._http = httpx.Client(
            base_url=self.url,
            headers={"User-Agent": f"slotline/{__version__}"},
            limits=httpx.Limits(max_connections=None),
            # A proxy from the environment is not the way to this very machine.
            trust_env=not is_loopback(self.url),
        )

    def close(self) -> None:
        """Close every connection. A thread that waits for its end must be woken first."""
        for reader in list(self.readers):
            reader.close()
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send one request and return its JSON answer.

        Raises:
            ApiError: the server refused, and kept to it if it had said when to try again.
            ConnectionFailed: it was not reached, or its answers were lost.
            ProtocolError: the answer is not JSON.
        """
        deadline = self.clock() + (self.timeout_s if timeout_s is None else timeout_s)
        request = self._http.build_request(method, path, json=body, params=params, headers=headers)
        for attempt in range(1, ATTEMPTS + 1):
            answer = self._once(request, deadline)
            if isinstance(answer, httpx.Response):
                return json_of(answer)
            wait_s = _pause_s(answer, attempt)
            if wait_s is None or attempt == ATTEMPTS or self.clock() + wait_s >= deadline:
                raise answer
            self.sleep(wait_s)
        raise AssertionError("the loop above ends by return or raise")

    def once(self, method: str, path: str, *, timeout_s: float, **content: Any) -> Any:
        """Send a request that must not be repeated, and return its JSON answer.

        Args:
            timeout_s: how long the server may be silent.
            content: what `httpx` takes as the content of a request, such as `files`.

        Raises:
            ApiError, ConnectionFailed, ProtocolError: as `call` does.
        """
        limits = httpx.Timeout(timeout_s, connect=CONNECT_S)
        try:
            response = self._http.request(method, path, timeout=limits, **content)
        except httpx.TransportError as error:
            raise self._lost(error) from None
        if not response.is_success:
            raise api_error(response)
        return json_of(response)

    def download(self, path: str) -> Iterator[bytes]:
        """The content behind a path, piece by piece.

        Raises:
            ApiError, ConnectionFailed: as `call` does, but nothing is tried twice.
        """
        limits = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        try:
            with self._http.stream("GET", path, timeout=limits) as response:
                if not response.is_success:
                    response.read()
                    raise api_error(response)
                yield from response.iter_bytes()
        except httpx.TransportError as error:
            raise self._lost(error) from None

    def _once(self, request: httpx.Request, deadline: float) -> httpx.Response | ApiError | ConnectionFailed:
        left_s = max(0.01, deadline - self.clock())
        request.extensions = {"timeout": httpx.Timeout(left_s, connect=min(left_s, CONNECT_S)).as_dict()}
        try:
            response = self._http.send(request)
        except httpx.TransportError as error:
            return self._lost(error)
        return response if response.is_success else api_error(response)

    def open_events(self, path: str, last_event_id: str | None, wait_s: float | None = None) -> EventReader:
        """Open an event stream, waiting at most `wait_s`; the caller closes it.

        Raises:
            ApiError, ConnectionFailed, ProtocolError: as `call` does, but nothing is tried twice.
        """
        # A connection of its own: whoever gives up shuts it down under the reading thread.
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Connection": "close"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        wait_s = SILENCE_S if wait_s is None else max(0.01, min(wait_s, SILENCE_S))
        limits = httpx.Timeout(wait_s, connect=min(wait_s, CONNECT_S))
        request = self._http.build_request("GET", path, headers=headers, timeout=limits)
        response: httpx.Response | None = None
        try:
            response = self._http.send(request, stream=True)
            check_events(response)
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, httpx.TransportError):
                raise self._lost(error) from None
            raise
        reader = EventReader(response)
        self.readers.add(reader)
        return reader

    def _lost(self, error: httpx.TransportError) -> ConnectionFailed:
        if isinstance(error, httpx.UnsupportedProtocol | httpx.ConnectError | httpx.ConnectTimeout):
            return ConnectionFailed(f"no server answers at {self.url}", self.url, refused=True)
        if isinstance(error, httpx.TimeoutException):
            return ConnectionFailed(f"{self.url} did not answer in time", self.url)
        return ConnectionFailed(f"the connection to {self.url} was lost: {error}", self.url)


def job_path(job_id: str) -> str:
    """Where a job is; an odd id cannot lead elsewhere."""
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _pause_s(failure: ApiError | ConnectionFailed, attempt: int) -> float | None:
    """How long to wait before the request is sent again; None if it must not be, or would be in vain."""
    if isinstance(failure, ApiError):
        return failure.retry_after_s if failure.status in BUSY else None
    return None if failure.refused else BACKOFF_S * 2**attempt


def _checked(url: str) -> str:
    # Users of the `openai` package have an address that ends in `/v1`.
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConnectionFailed(f"{url!r} is not the URL of a server", url, refused=True)
    return url


def is_loopback(url: str) -> bool:
    """Whether a server is on this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
