"""The way to Redis: one place for time limits, retries, waiting at start, and what its errors mean."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MaxConnectionsError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry

from shared.errors import RedisUnavailable
from shared.names import REPLICATED
from shared.settings import Settings

log = logging.getLogger("slotline.redis")

T = TypeVar("T")

#: How long somebody waits for one of a limited number of connections. That none is free says that this process is
#: busy, not that Redis is away, so it is longer than a command may take.
POOL_WAIT_S = 30.0
#: A connection that was idle for so long is asked for a sign of life before it is used.
PING_AFTER_S = 30

#: First words of Redis' answers that speak of its state, not of our command: the same command may do later.
SICK = {
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "READONLY",
    "TRYAGAIN",
    "UNBLOCKED",
    "UNKILLABLE",
}
#: What stands before Redis' own words, as redis-py's pipelines and Redis' transactions put it.
_LEADS = (" of pipeline caused error: ", "Transaction discarded because of: ")


class _Link:
    """A connection that is not used again once the server behind it may have been demoted.

    After a failover behind one address a connection that was open before still leads to the old server, which
    refuses every write. As soon as one connection of this process is told so, all that were made before are made
    anew when they are next taken from their pool.
    """

    failovers: ClassVar[int] = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._made_after = _Link.failovers

    def connect(self) -> None:
        """Called by the pool before each use; does nothing where the connection is good."""
        if self._made_after != _Link.failovers:
            self._made_after = _Link.failovers
            self.disconnect()  # type: ignore[attr-defined]
        super().connect()  # type: ignore[misc]

    def read_response(self, *args: Any, **options: Any) -> Any:
        """As redis-py's own."""
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ReadOnlyError:
            if self._made_after == _Link.failovers:
                _Link.failovers += 1
            raise


class _TcpLink(_Link, redis.Connection):
    pass


class _TlsLink(_Link, redis.SSLConnection):
    pass


class _UnixLink(_Link, redis.UnixDomainSocketConnection):
    pass


_LINKS = {"redis": _TcpLink, "rediss": _TlsLink, "unix": _UnixLink}


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
        "health_check_interval": PING_AFTER_S,
        "retry": Retry(NoBackoff(), 0),
        "connection_class": _LINKS[settings.redis_url.partition(":")[0]],
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
    *,
    warn: bool = True,
) -> None:
    """Return when Redis answers and is new enough for us; with `warn`, log it if it may throw our keys away.

    Raises:
        RedisUnavailable: it did not answer within `wait_s`, refused us, or is older than 7.0.
    """
    deadline = clock() + wait_s
    while True:
        try:
            version = str(client.info("server")["redis_version"])
            if warn:
                warn_of_eviction(client)
            break
        except AuthenticationError as error:
            # redis-py counts it as a lost connection, but waiting does not mend it.
            raise RedisUnavailable(f"Redis at {address(client)} refused us: {error}") from None
        except RedisError as error:
            if not is_outage(error):
                raise RedisUnavailable(f"Redis at {address(client)} refused us: {error}") from None
            if clock() >= deadline:
                raise RedisUnavailable(f"no answer from Redis at {address(client)}: {error}") from None
            sleep(0.25)
    if int(version.split(".")[0]) < 7:
        raise RedisUnavailable(f"Redis at {address(client)} is version {version}; 7.0 or newer is needed")


def is_outage(error: BaseException) -> bool:
    """Whether an error says that Redis is away or unwell, so that the same command may do later.

    A Redis that is full (`is_full`) is well, and still takes what makes room.
    """
    if isinstance(error, (ConnectionError, TimeoutError, ReadOnlyError, ClusterDownError, TryAgainError)):
        return True  # a Redis that is loading is a ConnectionError to redis-py; MASTERDOWN is a ClusterDownError
    return isinstance(error, RedisError) and _code(error) in SICK


def is_full(error: BaseException) -> bool:
    """Whether Redis refuses to store more: its `maxmemory` is used up."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, RedisError) and _code(error) == "OOM")


def _code(error: RedisError) -> str:
    """The word that Redis' answer began with. redis-py takes it off where it has a class for it."""
    known = getattr(error, "status_code", None)
    if known and known != "EXECABORT":
        return str(known)
    text = str(error)
    for lead in _LEADS:
        text = text.rpartition(lead)[2]
    return text.partition(" ")[0]


def again_if_lost(call: Callable[[], T]) -> T:
    """Make a call, and once more if its reply was lost. Only for what leaves everything the same when done twice.

    Raises:
        RedisError: as the call; of the second one where there is one.
    """
    try:
        return call()
    except (BusyLoadingError, AuthenticationError, MaxConnectionsError):
        raise  # redis-py counts them as lost connections, but nothing was done
    except (ConnectionError, TimeoutError) as error:
        log.warning("a reply of Redis was lost, asking again: %s", error)
        return call()


def warn_of_eviction(client: redis.Redis) -> None:
    """Log a warning if Redis may throw our keys away when it is full.

    It looks at what INFO says, since managed servers forbid CONFIG.

    Raises:
        RedisError: Redis did not answer.
    """
    memory: Any = client.info("memory")
    policy = memory.get("maxmemory_policy", "noeviction")
    if memory.get("maxmemory") and policy != "noeviction":
        log.warning(
            "Redis at %s has the maxmemory-policy %s: when it is full it throws jobs, results and leases away; "
            "set it to noeviction",
            address(client),
            policy,
        )


def address(client: redis.Redis) -> str:
    """Host and port, or the socket, without any password."""
    kwargs = client.connection_pool.connection_kwargs
    return str(kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}")


def wait_for_replicas(pipe: Any, settings: Settings) -> None:
    """End a pipeline with a wait for `redis_wait_replicas`; its last reply is how many have it.

    WAIT is for what its own connection wrote last, and so for all that anybody wrote before. So something is written
    first: what has to be there may be another's, or of an earlier call.
    """
    pipe.set(REPLICATED, "1")
    pipe.execute_command("WAIT", settings.redis_wait_replicas, int(settings.redis_timeout_s * 500))
