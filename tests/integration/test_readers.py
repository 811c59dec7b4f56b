"""Readers of streams, many at a time, and web processes that die under them: real processes."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest
import redis

from shared.names import events_key
from slotline import Client
from tests.integration.conftest import Jobs, StartWeb, StartWorker
from tests.processes import WebProcess, eventually
from tests.webapi.sse import events as sse_events

pytestmark = pytest.mark.integration

#: Twenty milliseconds a tick, and an answer that goes on for as long as it is let.
SLOW = {"model": "fake:count:0.02", "name": "fake-echo", "n_ctx": 8192}


def children(web: WebProcess) -> set[int]:
    """The process ids of the gunicorn workers."""
    return {child.pid for child in psutil.Process(web.process.pid).children()}


def connections(pid: int) -> int:
    """How many a process has open."""
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(pid).net_connections())


def test_a_reader_sees_a_job_wait_have_its_prompt_computed_and_generate_and_redis_carries_the_same(
    start_worker: StartWorker, start_web: StartWeb, jobs: Jobs, client: redis.Redis
) -> None:
    worker = start_worker(model="fake:count:0.2", name="fake-echo", n_ctx=4096, n_parallel=1, n_batch=32)
    web = start_web()
    jobs.until(jobs.submit(max_tokens=2), "completed")
    eventually(lambda: worker.stats.job_s, "there is something to estimate from")
    first = jobs.submit(max_tokens=3000)
    eventually(lambda: worker.stats.active_slots == 1, "no slot is free")
    job_id = jobs.submit("x" * 1000, max_tokens=3)
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(events_key(job_id))
        channel.get_message(timeout=5)
        frames = []
        with httpx.stream("GET", f"{web.url}/v1/jobs/{job_id}/events", timeout=60) as answer:
            for frame in sse_events(answer.iter_bytes()):
                if not frames:
                    jobs.store.cancel(first)
                frames.append(frame)
        heard = [json.loads(message["data"]) for message in iter(lambda: channel.get_message(timeout=1), None)]
    events = [(frame.event, frame.json()) for frame in frames]
    names = [name for name, _ in events]
    assert list(dict.fromkeys(names)) == ["queued", "started", "progress", "token", "done"]
    assert events[0][1]["ahead"] == 0 and events[0][1]["estimate_s"] > 0
    told = [data for name, data in events if name == "progress"]
    assert all(0 < data["done"] < data["total"] for data in told) and len(told) < 16
    assert events == [(message["event"], message["data"]) for message in heard]


def test_a_killed_web_process_leaves_readers_that_come_back_the_exact_text(
    start_worker: StartWorker, start_web: StartWeb, jobs: Jobs
) -> None:
    start_worker(**SLOW, n_parallel=5)
    web = start_web(web_workers=2)
    ids = [jobs.submit(f"job {number}", max_tokens=400) for number in range(5)]
    counts = [0] * 50

    def read(number: int) -> tuple[str, str]:
        with Client(web.url) as client, client.job(ids[number % 5]).stream(timeout=60) as stream:
            indexes, text = [], ""
            for token in stream:
                indexes.append(token.index)
                text += token.text
                counts[number] = len(indexes)
            assert indexes == list(range(len(indexes)))
            assert stream.result is not None
            return text, stream.result.text

    with ThreadPoolExecutor(len(counts)) as pool:
        readers = [pool.submit(read, number) for number in range(len(counts))]
        eventually(lambda: min(counts) >= 10, "every reader has tokens")
        before = children(web)
        victim = max(before, key=connections)
        assert len(before) == 2 and connections(victim) >= len(counts) / 2
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: children(web) - before, "another process has taken its place")
        found = [reader.result(timeout=120) for reader in readers]
    texts = {job_id: str(jobs.store.view(job_id)["text"]) for job_id in ids}
    assert [jobs.store.view(job_id)["usage"]["completion_tokens"] for job_id in ids] == [400] * 5
    assert found == [(texts[ids[number % 5]],) * 2 for number in range(len(counts))]


class Crowd:
    """Readers that take what comes, all on one thread."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.received = 0

    def join(self, job_id: str) -> None:
        """Open one more stream; on return its first bytes are there."""
        reader = socket.create_connection(self._address, timeout=60)
        reader.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert reader.recv(4096).startswith(b"HTTP/1.1 200 ")
        reader.setblocking(False)
        self._sockets.append(reader)
        self._selector.register(reader, selectors.EVENT_READ)

    def start(self) -> None:
        """From now on take what comes."""
        self._thread.start()

    def leave(self) -> None:
        """Close all connections without a word."""
        self._stop.set()
        if self._thread.ident:
            self._thread.join()
        self._selector.close()
        for reader in self._sockets:
            reader.close()

    def _read(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(timeout=0.05):
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(65_536)
                if not data:
                    self._selector.unregister(key.fileobj)
                self.received += len(data)


@contextmanager
def crowd(web: WebProcess) -> Iterator[Crowd]:
    found = Crowd(web.url)
    try:
        yield found
    finally:
        found.leave()


def test_a_thousand_streams_hold_nobody_up_and_leave_nothing_behind(
    start_worker: StartWorker, start_web: StartWeb, jobs: Jobs, client: redis.Redis
) -> None:
    start_worker(**SLOW, n_parallel=1)
    web = start_web(max_streams=1000, keep_alive_s=2)
    running = jobs.submit(max_tokens=5000)
    jobs.until_tokens(running)
    waiting = [jobs.submit() for _ in range(900)]
    took_s: list[float] = []
    with crowd(web) as readers, httpx.Client(base_url=web.url, timeout=60) as http:
        for job_id in [*waiting, *[running] * 100]:
            readers.join(job_id)
        readers.start()
        assert http.get("/v1/stats").json()["streams"] == 1000
        received = readers.received
        for _ in range(10):
            for ask in (lambda: http.get("/healthz"), lambda: http.post("/v1/jobs", json={"prompt": "hi"})):
                began = time.monotonic()
                assert ask().status_code in (200, 202)
                took_s.append(time.monotonic() - began)
        began = time.monotonic()
        refused = http.get(f"/v1/jobs/{running}/events")
        took_s.append(time.monotonic() - began)
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        eventually(lambda: readers.received > received + 100_000, "tokens keep coming")
        # A second is what is promised on a machine of its own; this one is shared with the rest of the tests.
        assert sorted(took_s)[len(took_s) // 2] < 1.0 and max(took_s) < 5.0, took_s
        readers.leave()
        eventually(lambda: http.get("/v1/stats").json()["streams"] == 0, "no stream is open", limit_s=30)
        eventually(lambda: client.pubsub_channels(events_key("*")) == [], "no channel is followed")
        assert refused.status_code == 503 and http.get(f"/v1/jobs/{running}").json()["status"] == "running"
    jobs.store.cancel_many([running, *waiting])
