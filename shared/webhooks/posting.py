"""One attempt to send a webhook over HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import httpx

from shared.webhooks.address import NotPublic, addresses_of

DEFAULT_PORTS = {"http": 80, "https": 443}


class NotSent(Exception):
    """There is no answer, and the message says why."""


class Poster:
    """Posts to addresses it has checked. Safe to share between threads.

    The name is resolved once, every address is checked, and the connection goes to one of these, so that a name that
    changes its mind gains nothing. Proxies of the environment, redirects and cookies play no part, and of the answer
    only the status is read.
    """

    def __init__(self, timeout_s: float, allow_private: bool) -> None:
        self._timeout_s = timeout_s
        self._allow_private = allow_private
        # No connection is used twice: the next one to the same address may be for another name.
        self._transport = httpx.HTTPTransport(
            trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Send and return the HTTP status.

        Raises:
            NotSent: there is none within `timeout_s`, or the URL leads where webhooks may not go.
        """
        with _Deadline(self._timeout_s) as deadline:
            try:
                return self._post(httpx.URL(url), headers, body, deadline)
            except NotPublic as error:
                raise NotSent(str(error)) from None
            except httpx.InvalidURL as error:
                raise NotSent(f"not a URL: {error}") from None
            except (httpx.TransportError, OSError) as error:
                if deadline.left_s <= 0 or isinstance(error, httpx.TimeoutException):
                    raise NotSent(f"no answer within {self._timeout_s:g} seconds") from None
                raise NotSent(f"{type(error).__name__}: {error}"[:300]) from None

    def close(self) -> None:
        """Let go of all connections."""
        self._transport.close()

    def _post(self, url: httpx.URL, headers: Mapping[str, str], body: bytes, deadline: _Deadline) -> int:
        host = url.raw_host.decode("ascii")
        addresses = addresses_of(host, url.port or DEFAULT_PORTS[url.scheme], self._allow_private)
        for address in addresses[:-1]:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return self._post_to(address, url, headers, body, deadline)
        return self._post_to(addresses[-1], url, headers, body, deadline)

    def _post_to(
        self, address: str, url: httpx.URL, headers: Mapping[str, str], body: bytes, deadline: _Deadline
    ) -> int:
        request = httpx.Request(
            "POST",
            url.copy_with(host=address),
            headers={"Host": url.netloc.decode("ascii"), "Connection": "close", **headers},
            content=body,
            extensions={
                "timeout": httpx.Timeout(max(0.001, deadline.left_s)).as_dict(),
                "sni_hostname": url.raw_host.decode("ascii"),
                "trace": deadline.trace,
            },
        )
        response = self._transport.handle_request(request)
        response.close()
        return response.status_code


class _Deadline:
    """Ends the connection of one request when its time is up.

    httpx bounds each single read and write, which a receiver that sends a byte now and then could draw out for ever.
    """

    def __init__(self, limit_s: float) -> None:
        self._until = time.monotonic() + limit_s
        self._watches: list[tuple[threading.Timer, socket.socket]] = []

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """httpcore's hook: it hands over each connection as soon as there is one."""
        if event != "connection.connect_tcp.complete":
            return
        # A copy, since TLS takes over the socket itself; shutting one down ends the connection of both.
        connection = info["return_value"].get_extra_info("socket").dup()
        timer = threading.Timer(max(0.0, self.left_s), _shut, [connection])
        timer.daemon = True
        self._watches.append((timer, connection))
        timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer, connection in self._watches:
            timer.cancel()
            timer.join()
            connection.close()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
