"""The world that the tests of jobs, streams and records live in."""

from __future__ import annotations

import pytest
import redis

from shared.jobs import JobStore
from tests.shared.world import World


@pytest.fixture
def world(store: JobStore, client: redis.Redis) -> World:
    return World(store, client)
