"""What every endpoint works with, made once per web process and after the fork."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from flask import Flask, current_app

from shared.connection import connect
from shared.jobs import JobStore
from shared.registry import Registry
from shared.settings import WebSettings
from webapi.metrics import Metrics
from webapi.streams import Hub

EXTENSION = "slotline"

#: Redis connections of one process. Hundreds of requests at once share them, each for a millisecond or so.
CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class Services:
    """The web process's connections and what is built on them. Safe to use from every request at once."""

    settings: WebSettings
    client: redis.Redis
    asker: redis.Redis
    store: JobStore
    registry: Registry
    hub: Hub
    metrics: Metrics

    @classmethod
    def build(cls, settings: WebSettings) -> Services:
        """Make everything from the settings; no connection is opened yet."""
        client = connect(settings, connections=CONNECTIONS)
        # A question blocks for up to `ask_timeout_s`, which must not look like a dead connection.
        asker_timeout_s = settings.redis_timeout_s + settings.ask_timeout_s
        asker = connect(settings, timeout_s=asker_timeout_s, connections=CONNECTIONS)
        hub = Hub(settings, client)
        return cls(
            settings=settings,
            client=client,
            asker=asker,
            store=JobStore(client, settings),
            registry=Registry(client),
            hub=hub,
            metrics=Metrics(lambda: hub.open_streams),
        )

    def close(self) -> None:
        """End the open streams and let go of Redis."""
        self.hub.close()
        self.client.close()
        self.asker.close()


def services() -> Services:
    """The services of the app that handles the current request."""
    return services_of(current_app)


def services_of(app: Flask) -> Services:
    """The services of an app made by `create_app`."""
    found: Services = app.extensions[EXTENSION]
    return found
