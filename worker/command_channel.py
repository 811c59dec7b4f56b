"""The channel over which RQ's tools and our own web side give a worker commands."""

from __future__ import annotations

import time
from typing import Any

from redis.client import PubSub

#: It is looked after this often, in seconds.
LOOK_S = 1.0


class CommandChannel(PubSub):
    """A subscription that notices when its connection is dead without having said so.

    redis-py asks a silent connection for a sign of life but never misses the answer, so a worker behind one would be
    deaf for as long as it lives.
    """

    def __init__(self, client: Any, limit_s: float) -> None:
        """Ask after `limit_s` of silence, and connect anew after twice that."""
        super().__init__(client.connection_pool)
        self._limit_s = limit_s

    def check_health(self) -> None:
        """Called by redis-py each time that it looks for a message.

        Raises:
            RedisError: the connection had to be made anew, and could not be.
        """
        connection: Any = self.connection
        # redis-py keeps this as the moment when it would ask next.
        silent_s = time.monotonic() - (connection.next_health_check - connection.health_check_interval)
        if silent_s > 2 * self._limit_s:
            connection.disconnect()
            connection.connect()  # which subscribes again
        elif silent_s > self._limit_s:
            connection.send_command("PING", self.HEALTH_CHECK_MESSAGE, check_health=False)
            self.health_check_response_counter += 1
