"""What every endpoint works with, made once per web process and after the fork."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from flask import Flask, current_app

from shared.batches.store import BatchStore
from shared.connection import connect
from shared.files import FileStore
from shared.jobs import JobStore
from shared.registry import Registry
from shared.settings import WebSettings
from webapi.bound import Bound
from webapi.callers import Watch
from webapi.metrics import Metrics
from webapi.storage import web_storage
from webapi.streams import Hub

EXTENSION = "slotline"

#: Redis connections of one process. Hundreds of requests at once share them, each for a millisecond or so.
CONNECTIONS = 64

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
    files: FileStore
    batches: BatchStore
    metrics: Metrics

    @classmethod
    def build(cls, settings: WebSettings) -> Services:
        """Make everything from the settings; no connection is opened yet."""
        client = connect(settings, connections=CONNECTIONS)
        # A question blocks until it is answered, which must not look like a dead connection.
        asker_timeout_s = settings.redis_timeout_s + PATIENCE * settings.ask_timeout_s
        asker = connect(settings, timeout_s=asker_timeout_s, connections=CONNECTIONS)
        hub = Hub(settings, client)
        store = JobStore(client, settings)
        return cls(
            settings=settings,
            client=client,
            asker=asker,
            store=store,
            registry=Registry(client),
            hub=hub,
            watch=Watch(),
            bound=Bound(settings, connect(settings), store),
            files=FileStore(client, web_storage(settings), settings),
            batches=BatchStore(client, settings),
            metrics=Metrics(lambda: hub.open_streams),
        )

    def close(self) -> None:
        """End the open streams and let go of Redis."""
        self.hub.close()
        self.watch.close()
        self.bound.close()
        self.client.close()
        self.asker.close()


def services() -> Services:
    """The services of the app that handles the current request."""
    return services_of(current_app)


def services_of(app: Flask) -> Services:
    """The services of an app made by `create_app`."""
    found: Services = app.extensions[EXTENSION]
    return found
