"""The Valkey of `slotline up`, for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from shared.connection import connect, wait_until_up
from shared.settings import Settings, load
from slotline.up.server import Server, find_server, last_words, start_server, stop_server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(**given) -> Server:
        started.append(start_server(tmp_path / "my valkey", **given))
        with client_of(started[-1]) as client:
            wait_until_up(client, 20)
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def client_of(server: Server) -> redis.Redis:
    return connect(load(Settings, {"redis_url": server.url}))


def test_it_keeps_what_it_was_told_over_a_stop(start, tmp_path: Path) -> None:
    server = start()
    with client_of(server) as client:
        client.set("a", "1")
    assert stop_server(server)
    with client_of(start()) as client:
        assert client.get("a") == b"1"
    assert (tmp_path / "my valkey" / "appendonlydir").is_dir()


def test_it_writes_every_change_evicts_nothing_and_is_for_this_machine_only(start) -> None:
    with client_of(start()) as client:
        shown = client.config_get("append*") | client.config_get("maxmemory-policy") | client.config_get("bind")
    assert (shown["appendonly"], shown["appendfsync"]) == ("yes", "everysec")
    assert (shown["maxmemory-policy"], shown["bind"]) == ("noeviction", "127.0.0.1")


def test_one_that_was_left_running_is_found_by_its_directory(start, tmp_path: Path) -> None:
    server = start()
    found = find_server(tmp_path / "my valkey")
    assert (found.process.pid, found.port, found.adopted) == (server.process.pid, server.port, True)
    assert find_server(tmp_path) is None
    assert find_server(tmp_path / "other") is None
    assert stop_server(found)
    server.process.wait()
    assert find_server(tmp_path / "my valkey") is None


def test_it_has_a_session_of_its_own(start) -> None:
    assert os.getsid(start().process.pid) != os.getsid(0)


def test_it_can_be_started_where_it_was(start) -> None:
    server = start()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    assert start(port=server.port).url == server.url


def test_one_that_cannot_start_says_why(start, tmp_path: Path) -> None:
    taken = start().port
    failed = start_server(tmp_path / "second", port=taken)
    assert failed.process.wait(timeout=30) == 1
    assert "listen" in last_words(tmp_path / "second").lower()
    assert last_words(tmp_path / "third") == "it left no log"
