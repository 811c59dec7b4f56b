"""What every endpoint works with, made once per web process and after the fork."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import redis
from flask import Flask, current_app
from redis.exceptions import RedisError

from shared.batches.store import BatchStore
from shared.connection import connect
from shared.deadlines import Deadlines
from shared.files import FileStore
from shared.jobs import JobStore
from shared.registry import Registry
from shared.settings import WebSettings
from shared.webhooks.sender import Sender
from webapi.bound import Bound
from webapi.callers import Watch
from webapi.metrics import Metrics
from webapi.storage import web_storage
from webapi.streams import Hub
from webapi.ticker import Ticker
from webapi.waiting import Waiting

log = logging.getLogger(__name__)

EXTENSION = "slotline"

#: Redis connections of one process. Hundreds of requests at once share them, each for a millisecond or so.
CONNECTIONS = 64

#: How often jobs are looked for that have waited too long. Workers look too, but there may be none.
DEADLINES_S = 1.0

#: Whoever waits for an answer on a connection waits this many times `ask_timeout_s` for a busy worker's check.
PATIENCE = 5


@dataclass(frozen=True, slots=True)
class Services:
    """The web process's connections and what is built on them. Safe to use from every request at once."""

    settings: WebSettings
    client: redis.Redis
    asker: redis.Redis
    store: JobStore
    registry: Registry
    hub: Hub
    watch: Watch
    bound: Bound
    waiting: Waiting
    deadlines: Ticker
    files: FileStore
    batches: BatchStore
    metrics: Metrics
    webhooks: Sender

    @classmethod
    def build(cls, settings: WebSettings) -> Services:
        """Make everything from the settings; no connection is opened yet."""
        client = connect(settings, connections=CONNECTIONS)
        # A question blocks until it is answered, which must not look like a dead connection.
        asker_timeout_s = settings.redis_timeout_s + PATIENCE * settings.ask_timeout_s
        asker = connect(settings, timeout_s=asker_timeout_s, connections=CONNECTIONS)
        hub = Hub(settings, client)
        store = JobStore(client, settings)
        registry = Registry(client)
        return cls(
            settings=settings,
            client=client,
            asker=asker,
            store=store,
            registry=registry,
            hub=hub,
            watch=Watch(),
            bound=Bound(settings, connect(settings), store),
            waiting=Waiting(store, registry),
            deadlines=Ticker("deadlines", DEADLINES_S, partial(_expire, Deadlines(store))),
            files=FileStore(client, web_storage(settings), settings),
            batches=BatchStore(client, settings),
            metrics=Metrics(lambda: hub.open_streams),
            webhooks=Sender(settings, connect(settings)),
        )

    def close(self) -> None:
        """End the open streams, wait for webhooks that are being sent, and let go of Redis."""
        self.webhooks.stop()
        self.hub.close()
        self.watch.close()
        self.bound.close()
        self.waiting.close()
        self.deadlines.close()
        self.webhooks.close()
        self.client.close()
        self.asker.close()


def _expire(deadlines: Deadlines) -> None:
    try:
        deadlines.expire()
    except RedisError as error:
        log.debug("jobs that wait too long wait for Redis: %s", error)


def services() -> Services:
    """The services of the app that handles the current request."""
    return services_of(current_app)


def services_of(app: Flask) -> Services:
    """The services of an app made by `create_app`."""
    found: Services = app.extensions[EXTENSION]
    return found
