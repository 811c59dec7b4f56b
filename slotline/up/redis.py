"""The Redis of one `slotline up`: its own Valkey, started or taken over, or the one it was given."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable
from typing import Any

from slotline.cli.faults import NoRedis
from slotline.up.plan import Plan
from slotline.up.server import Server, find_server, last_words, start_server, stop_server


class StopEarly(Exception):
    """A signal came before everything had been started."""


class Redis:
    """What web and worker keep everything in.

    Args:
        take: waits so many seconds for an event; a signal is a `signal.Signals`, our server's end a `Server`.
        put: adds an event.
        say: shows a line.

    Attributes:
        url: where it is.
    """

    def __init__(
        self,
        plan: Plan,
        take: Callable[[float], object],
        put: Callable[[Any], None],
        say: Callable[[str], None],
    ) -> None:
        self.url = plan.web.redis_url
        self._plan = plan
        self._data = plan.directory / "valkey"
        self._take = take
        self._put = put
        self._say = say
        self._server: Server | None = None
        self._put_off: list[object] = []

    @property
    def pid(self) -> int | None:
        """The process of our own server, None without one."""
        return self._server.process.pid if self._server is not None else None

    def start(self) -> None:
        """Have a Redis that answers.

        Raises:
            NoRedis: there is none to be had.
            StopEarly: a signal came while it was waited for.
        """
        left = find_server(self._data)
        if left is not None and (self._plan.fresh or not self._plan.own_redis):
            stop_server(left)
            left = None
        if self._plan.fresh and self._data.exists():
            self._say(f"emptying {self._data}")
            shutil.rmtree(self._data)
        if self._plan.own_redis:
            self._use(left or start_server(self._data))
        self._wait_until_up()

    def restart(self) -> None:
        """Start our own server again after it has ended; the others find it at the same place.

        Raises:
            NoRedis, StopEarly: as for `start`.
        """
        assert self._server is not None
        self._say("Valkey ended unexpectedly")
        self._use(start_server(self._data, self._server.port))
        self._wait_until_up()

    def stop(self) -> None:
        """Let our own server write what it has and end."""
        if self._server is None:
            return
        self._say("stopping Valkey")
        if not stop_server(self._server):
            self._say("Valkey did not stop in time and was killed")

    def _use(self, server: Server) -> None:
        how = "taking over the Valkey that was left running" if server.adopted else "starting Valkey"
        self._say(f"{how} on port {server.port}, data in {self._data}")
        self._server, self.url = server, server.url

        def wait() -> None:
            server.process.wait()
            self._put(server)

        threading.Thread(target=wait, name="valkey-wait", daemon=True).start()

    def _wait_until_up(self) -> None:
        from shared.connection import connect, wait_until_up
        from shared.errors import RedisUnavailable

        settings = self._plan.web.model_copy(update={"redis_url": self.url})
        client = connect(settings)
        try:
            wait_until_up(client, settings.redis_wait_s, sleep=self._pause)
        except RedisUnavailable as error:
            raise NoRedis(str(error)) from None
        finally:
            client.close()
            for event in self._put_off:
                self._put(event)
            self._put_off.clear()

    def _pause(self, seconds: float) -> None:
        event = self._take(seconds)
        if isinstance(event, signal.Signals):
            raise StopEarly
        if isinstance(event, Server):
            raise NoRedis(f"Valkey did not start: {last_words(self._data)}")
        if event is not None:
            self._put_off.append(event)
