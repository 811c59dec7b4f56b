"""The world that the tests of jobs, streams and records live in."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from shared.jobs import JobStore
from tests.shared.world import World


@pytest.fixture
def world(store: JobStore, client: redis.Redis) -> World:
    return World(store, client)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes to Redis from now on, one entry for each round trip."""
    packets: list[Any] = []
    send = redis.connection.Connection.send_packed_command

    def note(self: Any, command: Any, check_health: bool = True) -> None:
        packets.append(command)
        send(self, command, check_health)

    monkeypatch.setattr(redis.connection.Connection, "send_packed_command", note)
    return packets
