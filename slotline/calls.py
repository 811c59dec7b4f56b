"""Many exchanges with a server at once, on one event loop in a thread of its own.

Every call may be repeated without harm: a job carries its id, and what is bound to its connection ends with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import httpx

from slotline import __version__
from slotline.answers import api_error, json_of
from slotline.errors import ApiError, ConnectionFailed, ProtocolError, SlotlineClientError
from slotline.transport import CONNECT_S, is_loopback, job_path

#: A submit waits so long for the end of its job before it asks again; proxies cut what is silent for a minute.
WAIT_S = 45.0

#: The connection of an OpenAI-style call is silent until its answer is there.
ANSWER_S = 3600.0

#: Waits between repeats, doubled each time.
FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 5.0

#: Answers of a server, or of a proxy before it, that is not well just now.
UNWELL = (502, 503)

#: How long cancelling what is under way may take.
CLOSE_S = 5.0

OVER = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: the JSON of its answer, or why there is none. `key` is the caller's."""

    key: Any
    body: dict[str, Any] | None = None
    error: SlotlineClientError | None = None
    job_id: str = ""


class Calls:
    """Sends calls and collects their answers in the order in which they come.

    The caller bounds how many are under way; the methods may be called from any one thread.

    Args:
        url: the server, as `Transport` knows it.
        patience_s: how long to go on without the server being well; a full queue is waited for as long as it takes.

    Attributes:
        trouble: why calls are being repeated just now; None while all is well.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        self.trouble: str | None = None
        self._url = url
        self._patience_s = patience_s
        self._unwell_since: float | None = None
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"User-Agent": f"slotline/{__version__}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not is_loopback(url),
        )
        self._thread = threading.Thread(target=self._serve, name="slotline-calls", daemon=True)
        self._thread.start()

    def run_job(self, key: Any, body: Mapping[str, Any]) -> None:
        """Submit a job, whose body has an `id`, and wait for its end; `close` cancels it."""
        self._begin(key, self._job(body), str(body["id"]))

    def post(self, key: Any, path: str, body: Mapping[str, Any]) -> None:
        """Send a call that is bound to its connection; `close` leaves it, and the server ends it."""
        self._begin(key, self._repeat(path, body, None, ANSWER_S), "")

    def ended(self, wait_s: float | None) -> list[Answer]:
        """The answers that have come; waits at most `wait_s` for the first, or as long as it takes."""
        found: list[Answer] = []
        with suppress(Empty):
            found.append(self._answers.get(timeout=wait_s))
            while True:
                found.append(self._answers.get_nowait())
        return found

    def close(self) -> None:
        """Cancel what is under way and close the connections. A second call does nothing."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._leave())
        finally:
            self._loop.close()

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        await self._http.aclose()

    def _begin(self, key: Any, call: Coroutine[Any, Any, dict[str, Any]], job_id: str) -> None:
        def begin() -> None:
            task = self._loop.create_task(self._answer(key, call, job_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    async def _answer(self, key: Any, call: Coroutine[Any, Any, dict[str, Any]], job_id: str) -> None:
        try:
            self._answers.put(Answer(key, await call, None, job_id))
        except SlotlineClientError as error:
            self._answers.put(Answer(key, None, error, job_id))
        except Exception as error:
            # A defect, or a body that is no JSON: it belongs to this call, and the others go on.
            self._answers.put(Answer(key, None, SlotlineClientError(f"{type(error).__name__}: {error}"), job_id))

    async def _job(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            while True:
                job = await self._repeat("/v1/jobs", body, {"wait": WAIT_S}, WAIT_S + 15)
                if job.get("status") in OVER:
                    return job
        except asyncio.CancelledError:
            with suppress(httpx.HTTPError):
                await self._http.post(f"{job_path(str(body['id']))}/cancel", timeout=CLOSE_S)
            raise

    async def _repeat(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, Any] | None, read_s: float
    ) -> dict[str, Any]:
        """Send a request until there is an answer that says yes or no.

        Raises:
            ApiError: the server refused.
            ConnectionFailed: it has not been well for too long.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            failure = await self._once(path, body, params, read_s)
            well = not isinstance(failure, ConnectionFailed | ApiError) or _is_well(failure)
            self._unwell_since = None if well else self._unwell_since or time.monotonic()
            if isinstance(failure, dict):
                return failure
            wait_s = self._wait_s(failure, pause_s)
            if wait_s is None:
                raise failure
            self.trouble = str(failure)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _once(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, Any] | None, read_s: float
    ) -> dict[str, Any] | ApiError | ConnectionFailed:
        limits = httpx.Timeout(read_s, connect=CONNECT_S)
        try:
            response = await self._http.post(path, json=body, params=params, timeout=limits)
        except httpx.TransportError as error:
            refused = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol)
            lost = "no server answers at" if refused else "the connection was lost to"
            return ConnectionFailed(f"{lost} {self._url}", self._url, refused=refused)
        if not response.is_success:
            return api_error(response)
        self.trouble = None
        found = json_of(response)
        if not isinstance(found, dict):
            raise ProtocolError(f"{self._url} did not answer with an object: is it a Slotline server?")
        return found

    def _wait_s(self, failure: ApiError | ConnectionFailed, pause_s: float) -> float | None:
        """How long to wait before a request is sent again; None if it must not be."""
        if isinstance(failure, ApiError) and failure.status == 429:
            return max(pause_s, min(failure.retry_after_s or 0.0, MOST_PAUSE_S))
        if self._unwell_since is None or time.monotonic() - self._unwell_since >= self._patience_s:
            return None
        return pause_s


def _is_well(failure: ApiError | ConnectionFailed) -> bool:
    """Whether the answer is the server's own word on the request; a proxy's time limit has no code of ours."""
    if isinstance(failure, ConnectionFailed):
        return False
    return failure.status not in UNWELL and not (failure.status == 504 and failure.code == "unknown")
