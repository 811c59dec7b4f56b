"""The storage as a web process uses it: no wait for a disk or a remote service may hold up the other requests."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import gevent
from gevent import monkey

from shared.errors import StorageUnavailable
from shared.settings import Settings
from shared.storage import Storage, UrlStorage, storage_of

log = logging.getLogger(__name__)


def web_storage(settings: Settings) -> Storage:
    """The storage of the settings, fit for the server's gevent workers. One that cannot be used is only logged."""
    if not monkey.is_module_patched("threading"):
        return storage_of(settings)
    storage = storage_of(settings, fsync=_fsync)
    if isinstance(storage, UrlStorage):
        _run_fsspec_in_greenlet()
        try:
            storage.load()
        except StorageUnavailable as error:
            log.warning("files and batches are out of order: %s", error.message)
    return storage


def _fsync(file: int) -> None:
    """Wait for the disk on a thread of its own."""
    gevent.get_hub().threadpool.apply(os.fsync, (file,))


class _Loop:
    """An event loop that does not look like itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def _run_fsspec_in_greenlet() -> None:
    """Give fsspec's asynchronous file systems an event loop that works below gevent.

    Their loop runs on a thread of its own, which is a greenlet here. asyncio notes the running loop of each real
    thread, so that all greenlets seem to run inside it, and fsspec refuses to wait for a loop it runs inside of. It
    compares by identity, and so is given a stand-in.
    """
    import fsspec.asyn

    if fsspec.asyn.loop[0] is None:
        loop = asyncio.new_event_loop()
        gevent.spawn(loop.run_forever)
        fsspec.asyn.loop[0] = _Loop(loop)
