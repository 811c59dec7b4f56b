"""Fixtures of every test: a Valkey of its own for the run, empty at the start of each test.

Several processes may share a run (pytest-xdist). Each of them has a Valkey of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import redis

from shared.connection import connect
from shared.jobs import JobStore
from shared.settings import Settings, load
from tests.processes import new_valkey

# Examples have no time limit: how long one takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "slotline", hypothesis.settings.default, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("slotline")


def pytest_unconfigure() -> None:
    """Close two files that llama_cpp opens when it is imported; at the end of Python they would be warned of."""
    if utils := sys.modules.get("llama_cpp._utils"):
        utils.outnull_file.close()
        utils.errnull_file.close()


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """URL of a real server that lives as long as the test run."""
    with new_valkey() as server:
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
        thread.join(timeout=30)
        assert not thread.is_alive(), f"{thread.name} was left running"
