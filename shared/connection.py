"""The way to Redis: one place for time limits, retries and waiting at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, RedisError, TimeoutError
from redis.retry import Retry

from shared.errors import RedisUnavailable
from shared.settings import Settings

#: How long somebody waits for one of a limited number of connections. That none is free says that this process is
#: busy, not that Redis is away, so it is longer than a command may take.
POOL_WAIT_S = 30.0


def connect(settings: Settings, *, timeout_s: float | None = None, connections: int | None = None) -> redis.Redis:
    """A client that sends each command once.

    redis-py's own retries are off: a submit or a pull whose reply was lost must not be sent again blindly.

    Args:
        settings: the way to Redis.
        timeout_s: time limit of one command, in place of the configured one.
        connections: open at most so many; who needs one more waits. Left out, redis-py's limit of 100 holds,
            beyond which it raises. Who waits for more than `POOL_WAIT_S` gets a ConnectionError too.
    """
    limit = timeout_s or settings.redis_timeout_s
    options: dict[str, Any] = {
        "socket_timeout": limit,
        "socket_connect_timeout": limit,
        "health_check_interval": 30,
        "retry": Retry(NoBackoff(), 0),
    }
    if not settings.redis_url.startswith("unix:"):
        options["socket_keepalive"] = True
    if connections is None:
        return redis.Redis.from_url(settings.redis_url, **options)
    pool = redis.BlockingConnectionPool.from_url(
        settings.redis_url, max_connections=connections, timeout=POOL_WAIT_S, **options
    )
    return redis.Redis.from_pool(pool)


def wait_until_up(
    client: redis.Redis,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when Redis answers and is old enough for us.

    Raises:
        RedisUnavailable: it did not answer within `wait_s`, refused us, or is older than 7.0.
    """
    deadline = clock() + wait_s
    while True:
        try:
            version = str(client.info("server")["redis_version"])
            break
        except AuthenticationError as error:
            # redis-py counts it as a lost connection, but waiting does not mend it.
            raise RedisUnavailable(f"Redis at {address(client)} refused us: {error}") from None
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
