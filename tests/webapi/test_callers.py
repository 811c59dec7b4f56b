from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from webapi.callers import Watch, caller_is_gone

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


@pytest.fixture(params=["local", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Our end of a connection, and the caller's."""
    if request.param == "local":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def test_a_caller_is_gone_once_it_has_closed(pair: Pair) -> None:
    ours, theirs = pair
    assert not caller_is_gone({"gunicorn.socket": ours})
    theirs.sendall(b"the beginning of a next request")
    assert not caller_is_gone({"gunicorn.socket": ours})
    theirs.close()
    assert caller_is_gone({"gunicorn.socket": ours})


def test_a_caller_that_cannot_be_seen_is_there() -> None:
    assert not caller_is_gone({})


def test_the_call_of_a_caller_that_leaves_is_told_once(watch: Watch, pair: Pair) -> None:
    ours, theirs = pair
    left = threading.Semaphore(0)
    watch.add(ours, left.release)
    theirs.sendall(b"the beginning of a next request")
    assert not left.acquire(timeout=0.25)
    theirs.close()
    assert left.acquire(timeout=5)
    assert not left.acquire(timeout=0.25)
    watch.remove(ours)


def test_many_connections_are_watched_and_only_those_that_close_are_told(watch: Watch) -> None:
    pairs = [socket.socketpair() for _ in range(100)]
    left: list[int] = []
    told = threading.Semaphore(0)

    def leave(number: int) -> None:
        left.append(number)
        told.release()

    for number, (ours, _) in enumerate(pairs):
        watch.add(ours, partial(leave, number))
    for number in (3, 50, 99):
        pairs[number][1].close()
    for _ in range(3):
        assert told.acquire(timeout=5)
    assert sorted(left) == [3, 50, 99]
    for ours, theirs in pairs:
        watch.remove(ours)
        ours.close()
        theirs.close()


def test_a_connection_that_is_watched_no_more_is_not_told(watch: Watch, pair: Pair) -> None:
    ours, theirs = pair
    left = threading.Event()
    watch.add(ours, left.set)
    watch.remove(ours)
    theirs.close()
    assert not left.wait(0.25)


def test_a_connection_may_be_watched_again_for_its_next_call(watch: Watch, pair: Pair) -> None:
    ours, theirs = pair
    first, second = threading.Event(), threading.Event()
    watch.add(ours, first.set)
    watch.remove(ours)
    watch.add(ours, second.set)
    theirs.close()
    assert second.wait(5)
    assert not first.is_set()
    watch.remove(ours)
