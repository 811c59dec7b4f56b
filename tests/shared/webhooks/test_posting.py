from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shared.webhooks.posting import NotSent, Poster
from tests.receiver import Receiver

HEADERS = {"webhook-id": "msg_1", "Content-Type": "application/json"}


@contextmanager
def poster(timeout_s: float = 30.0, allow_private: bool = True) -> Iterator[Poster]:
    found = Poster(timeout_s, allow_private)
    yield found
    found.close()


def test_the_body_arrives_with_its_headers() -> None:
    with Receiver() as receiver, poster() as post:
        assert post.post(f"{receiver.url}/a?b=1", HEADERS, b"{}") == 200
        (got,) = receiver.got
    assert (got.path, got.body) == ("/a?b=1", b"{}")
    assert got.headers["Host"] == f"127.0.0.1:{receiver.port}"
    assert (got.headers["webhook-id"], got.headers["Content-Type"]) == ("msg_1", "application/json")


def test_the_host_is_the_name_and_cookies_are_not_kept() -> None:
    with Receiver() as receiver, poster() as post:
        for _ in range(2):
            assert post.post(f"http://localhost:{receiver.port}/", HEADERS, b"{}") == 200
        assert [got.headers["Host"] for got in receiver.got] == [f"localhost:{receiver.port}"] * 2
        assert all("Cookie" not in got.headers for got in receiver.got)


def test_a_redirect_is_an_answer_like_any_other() -> None:
    with Receiver() as target, Receiver(302, location=target.url) as receiver, poster() as post:
        assert post.post(receiver.url, HEADERS, b"{}") == 302
        assert target.got == []


def test_a_proxy_of_the_environment_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as proxy, Receiver() as receiver, poster() as post:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert post.post(receiver.url, HEADERS, b"{}") == 200
        assert (len(receiver.got), proxy.got) == (1, [])


def test_what_is_not_public_is_never_connected_to() -> None:
    with Receiver() as receiver, poster(allow_private=False) as post:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"):
            with pytest.raises(NotSent, match="not a public address"):
                post.post(f"http://{host}:{receiver.port}/", HEADERS, b"{}")
        assert receiver.got == []


def test_a_name_that_changes_its_mind_after_the_check_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, asked, connected = socket.getaddrinfo, [], []

    def rebinding(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "rebinding.example":
            return look_up(host, port, *args, **options)
        asked.append(host)
        address = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return look_up(address, port, *args, **options)

    def connect(address: Any, *args: Any, **options: Any) -> socket.socket:
        connected.append(address)
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(socket, "create_connection", connect)
    with poster(allow_private=False) as post, pytest.raises(NotSent, match="nobody there"):
        post.post("http://rebinding.example/", HEADERS, b"{}")
    assert (asked, connected) == (["rebinding.example"], [("93.184.216.34", 80)])


def test_the_next_address_is_tried_where_nobody_listens_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def two(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "two.example":
            return look_up(host, port, *args, **options)
        return [*look_up("127.0.0.2", port, type=socket.SOCK_STREAM), *look_up("127.0.0.1", port)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with Receiver() as receiver, poster() as post:
        assert post.post(f"http://two.example:{receiver.port}/", HEADERS, b"{}") == 200


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/", "refused"),
        ("http://no-such-host.invalid/", "gaierror"),
        ("http://" + "a" * 64 + ".example/", "no host name"),
    ],
)
def test_whoever_cannot_be_reached_is_a_reason_not_a_defect(url: str, why: str) -> None:
    with poster() as post, pytest.raises(NotSent, match=why):
        post.post(url, HEADERS, b"{}")


Serve = Callable[[socket.socket], None]


@contextmanager
def listening(serve: Serve) -> Iterator[int]:
    """A port whose one connection is served by a function."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def drip(connection: socket.socket) -> None:
    """Answer a byte at a time and never come to an end, until the other side has had enough."""
    try:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)
    except OSError:
        return


def swallow(connection: socket.socket) -> None:
    """Say nothing until the other side has had enough."""
    while connection.recv(65536):
        pass


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("serve", [drip, swallow])
def test_the_time_limit_is_for_all_of_an_attempt(serve: Serve, scheme: str) -> None:
    with (
        listening(serve) as port,
        poster(timeout_s=0.3) as post,
        pytest.raises(NotSent, match=r"within 0\.3 seconds|SSL"),
    ):
        post.post(f"{scheme}://127.0.0.1:{port}/", HEADERS, b"{}")


def test_tls_asks_for_the_name_and_refuses_a_certificate_that_nobody_vouches_for() -> None:
    seen: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def note(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: Any) -> int:
        seen.append(name)
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context.set_servername_callback(note)

    def serve(connection: socket.socket) -> None:
        try:
            context.wrap_socket(connection, server_side=True)
        except OSError:
            return

    with listening(serve) as port, poster() as post, pytest.raises(NotSent):
        post.post(f"https://localhost:{port}/", HEADERS, b"{}")
    assert seen == ["localhost"]
