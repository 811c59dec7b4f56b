"""The world that the tests of webhooks live in."""

from __future__ import annotations

import pytest
import redis

from shared.jobs import JobStore
from tests.shared.webhooks.ends import Ends


@pytest.fixture
def ends(store: JobStore, client: redis.Redis) -> Ends:
    return Ends(store, client)
