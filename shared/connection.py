"""The way to Redis: one place for time limits, retries and waiting at start."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError
from redis.retry import Retry

from shared.errors import RedisUnavailable
from shared.settings import Settings


def connect(settings: Settings, *, timeout_s: float | None = None) -> redis.Redis:
    """A client that sends each command once.

    redis-py's own retries are off: a submit or a pull whose reply was lost must not be sent again blindly.
    """
    limit = timeout_s or settings.redis_timeout_s
    return redis.Redis.from_url(
        settings.redis_url,
        socket_timeout=limit,
        socket_connect_timeout=limit,
        socket_keepalive=True,
        health_check_interval=30,
        retry=Retry(NoBackoff(), 0),
    )


def wait_until_up(
    client: redis.Redis,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when Redis answers and is old enough for us.

    Raises:
        RedisUnavailable: it did not answer within `wait_s`, or is older than 7.0.
    """
    deadline = clock() + wait_s
    while True:
        try:
            version = str(client.info("server")["redis_version"])
            break
        except (ConnectionError, TimeoutError, BusyLoadingError) as error:
            if clock() >= deadline:
                raise RedisUnavailable(f"no answer from Redis at {address(client)}: {error}") from None
            sleep(0.25)
        except RedisError as error:
            raise RedisUnavailable(f"Redis at {address(client)} refused us: {error}") from None
    if int(version.split(".")[0]) < 7:
        raise RedisUnavailable(f"Redis at {address(client)} is version {version}; 7.0 or newer is needed")


def address(client: redis.Redis) -> str:
    """Host and port, or the socket, without any password."""
    kwargs = client.connection_pool.connection_kwargs
    return str(kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}")
