"""The hub: one Redis subscription for all readers of a web process.

A thread of its own holds the only pub/sub connection; nothing else touches that connection. It subscribes to a
job's channel when the first reader comes and lets go when the last one leaves, and it ends, with its
connection, some seconds after the last reader of all. Readers wake it over a channel of the hub's own, so that
even a quiet connection takes new readers at once.

A job whose reader comes before the job itself needs no subscription of its own: its id begins with a mark of the hub
(`new_id`), and the hub listens for everything with that mark.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import RedisError, TimeoutError

from shared.connection import connect
from shared.errors import RedisUnavailable, Unavailable
from shared.names import events_key
from shared.settings import WebSettings
from shared.stream import Event
from webapi.subscription import Inbox, Subscription

log = logging.getLogger(__name__)

#: How often a quiet hub looks after its subscriptions.
TICK_S = 1.0
#: How long the hub stays after its last reader: a burst of short waits shares one connection.
LINGER_S = 5.0
RECONNECT_S = 0.25
#: How long the hub works without a pause. Under gevent a socket that always has more never lets anybody else run: not
#: the readers, and not whoever renews this process's lease.
SLICE_S = 0.005
#: How long it pauses then. After a pause of 0 gevent may run it 50 times more before it looks at other sockets.
PAUSE_S = 0.0001


class Hub:
    """Gives readers their subscriptions and feeds them."""

    def __init__(self, settings: WebSettings, client: redis.Redis) -> None:
        self._settings = settings
        self._client = client
        self._control = f"slotline:web:{uuid.uuid4().hex}"
        self._mark = uuid.uuid4().hex[:12]
        self._marked = events_key(f"{self._mark}*")
        self._lock = threading.Lock()
        self._readers: dict[str, tuple[Subscription, ...]] = {}
        self._asked: set[str] = set()  # channels we have sent SUBSCRIBE for on this connection
        self._live: set[str] = set()  # those of them Redis has confirmed, and the pattern of the mark once it is
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def open_streams(self) -> int:
        """Readers there are now, whatever the number of jobs that each follows."""
        with self._lock:
            return self._count()

    def _count(self) -> int:
        return len({reader.inbox for readers in self._readers.values() for reader in readers})

    def new_id(self) -> str:
        """An id for a job that this process is going to follow; also what the ids of several jobs may begin with."""
        return self._mark + uuid.uuid4().hex[len(self._mark) :]

    def open(self, job_id: str) -> Subscription:
        """Subscribe to a job; see `open_all`."""
        return self.open_all([job_id])[0]

    def open_all(self, job_ids: Sequence[str]) -> list[Subscription]:
        """Subscribe one reader to some jobs, with one inbox.

        On return Redis has confirmed it, so whatever is published now arrives.

        Raises:
            Unavailable: `max_streams` readers are here already, or the server is stopping.
            RedisUnavailable: Redis did not confirm in time.
            RedisError: it could not be reached.
        """
        inbox = Inbox()
        subscriptions = [Subscription(job_id, self._leave, inbox) for job_id in job_ids]
        self._enter(subscriptions)
        try:
            self._wait_until_live(subscriptions)
        except BaseException:
            for subscription in subscriptions:
                subscription.close()
            raise
        return subscriptions

    def _wait_until_live(self, subscriptions: Sequence[Subscription]) -> None:
        if not all(subscription.ready.is_set() for subscription in subscriptions):
            self._client.publish(self._control, "")  # wakes the thread
        deadline = time.monotonic() + self._settings.redis_timeout_s
        for subscription in subscriptions:
            if not subscription.ready.wait(max(0.0, deadline - time.monotonic())):
                raise RedisUnavailable("Redis did not confirm the subscription in time")

    def _leave(self, subscription: Subscription) -> None:
        """Forget a reader; its channel is let go at the hub's next look."""
        with self._lock:
            rest = tuple(r for r in self._readers.get(subscription.channel, ()) if r is not subscription)
            if rest:
                self._readers[subscription.channel] = rest
            else:
                self._readers.pop(subscription.channel, None)

    def close(self) -> None:
        """End every stream and the thread. The hub takes no readers after this."""
        self._closing.set()
        with self._lock:
            readers = [reader for group in self._readers.values() for reader in group]
            thread = self._thread
        for reader in readers:
            reader.shut()
        if thread is not None and thread.is_alive():
            with contextlib.suppress(RedisError):
                self._client.publish(self._control, "")  # wakes it
            thread.join(timeout=2 * TICK_S)

    def _source(self, channel: str) -> str:
        """What has to be subscribed to for a channel: itself, or the pattern of the mark."""
        return self._marked if channel.startswith(self._marked[:-1]) else channel

    def _enter(self, subscriptions: Sequence[Subscription]) -> None:
        limit = self._settings.max_streams
        with self._lock:
            if self._closing.is_set():
                raise Unavailable("the server is stopping")
            if self._count() >= limit:
                raise Unavailable(f"{limit} streams are open, which is the most one web process takes; try again")
            for subscription in subscriptions:
                channel = subscription.channel
                self._readers[channel] = (*self._readers.get(channel, ()), subscription)
                if self._source(channel) in self._live:
                    subscription.ready.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream-hub", daemon=True)
                self._thread.start()

    # --- the hub's own thread ---

    def _run(self) -> None:
        client: Any = connect(self._settings)
        # Messages as lists, and reads that give up after a tick, so that subscriptions are looked after.
        client.connection_pool.connection_kwargs |= {"protocol": 2, "socket_timeout": TICK_S}
        with client:
            self._serve(client.connection_pool)

    def _serve(self, pool: Any) -> None:
        while not self._closing.is_set():
            try:
                connection = pool.get_connection()
                try:
                    self._listen(connection)
                finally:
                    connection.disconnect()
                    pool.release(connection)
                return
            except (RedisError, OSError) as error:
                log.warning("the subscription to Redis was lost: %s", error)
            with self._lock:
                self._asked.clear()
                self._live.clear()
            self._closing.wait(RECONNECT_S)

    def _listen(self, connection: Any) -> None:
        """Feed the readers until the hub is closed or has had none for a while.

        It reads the connection itself: redis-py's `PubSub` takes four times as long for a message.
        """
        _send(connection, "SUBSCRIBE", self._control)
        _send(connection, "PSUBSCRIBE", self._marked)
        heard = wanted = paused = time.monotonic()
        while not self._closing.is_set():
            asked = time.monotonic()
            try:
                message = connection.read_response(disable_decoding=True, disconnect_on_error=False)
            except TimeoutError:
                message = None
            now = time.monotonic()
            if now - asked > PAUSE_S:
                paused = now  # it had to wait, so others have had their turn
            if message is not None:
                heard = now
                self._handle(connection, message)
                if now - paused >= SLICE_S:
                    time.sleep(PAUSE_S)
                    paused = time.monotonic()
                continue
            self._sync(connection)
            self._check_line(connection, now - heard)
            if self._readers:
                wanted = now
            elif now - wanted >= LINGER_S and self._retire():
                return

    def _handle(self, connection: Any, message: list[Any]) -> None:
        """Deal with what Redis says: `message`, `pmessage`, the answers to our commands, or `pong`."""
        kind, channel = message[0], message[1].decode()
        if kind == b"pmessage":
            self._dispatch(message[2].decode(), message[3])
        elif kind == b"message":
            if channel == self._control or not self._dispatch(channel, message[2]):
                self._sync(connection)
        elif kind in (b"subscribe", b"psubscribe"):
            if channel == self._control:
                self._sync(connection)
            else:
                self._confirm(channel)

    def _sync(self, connection: Any) -> None:
        """Subscribe to what readers want and let go of what none wants."""
        with self._lock:
            wanted = {channel for channel in self._readers if self._source(channel) == channel}
            new, old = wanted - self._asked, self._asked - wanted
            self._asked = wanted
            self._live -= old
        if new:
            _send(connection, "SUBSCRIBE", *new)
        if old:
            _send(connection, "UNSUBSCRIBE", *old)

    def _confirm(self, source: str) -> None:
        with self._lock:
            if source != self._marked and source not in self._asked:
                return
            self._live.add(source)
            channels = [c for c in self._readers if self._source(c) == source] if source == self._marked else [source]
            readers = [reader for channel in channels for reader in self._readers.get(channel, ())]
        for reader in readers:
            reader.confirm()

    def _dispatch(self, channel: str, data: bytes) -> bool:
        """Hand an event to its readers; False if there are none. Needs no lock: groups of readers never change."""
        readers = self._readers.get(channel)
        if not readers:
            return False
        try:
            event = Event.from_message(data)
        except ValueError:
            log.warning("something on %s that is no event was ignored", channel)
            return True
        for reader in readers:
            reader.offer(event)
        return True

    def _check_line(self, connection: Any, silent_s: float) -> None:
        """Notice a connection that is dead without having said so."""
        limit = self._settings.redis_timeout_s
        if silent_s > 2 * limit:
            raise TimeoutError(f"no sound from Redis for {silent_s:.0f} s")
        if silent_s > limit:
            _send(connection, "PING")

    def _retire(self) -> bool:
        """End the thread, unless a reader has come meanwhile."""
        with self._lock:
            if self._readers:
                return False
            self._thread = None
            self._asked.clear()
            self._live.clear()
            return True


def _send(connection: Any, *command: str) -> None:
    # redis-py's own check of the line would wait for an answer that comes between messages here.
    connection.send_command(*command, check_health=False)
