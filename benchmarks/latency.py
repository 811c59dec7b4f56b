"""How long a caller of an idle system waits for the first token, against a bare path over the same libraries.

    python -m benchmarks.latency --requests 200

Both run side by side on one Valkey and take turns. The model is scripted (`fake:echo`), so that nothing but the way
from the request to the token and back is measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.bare import REDIS_URL
from benchmarks.servers import Server, Slotline, free_port

PROMPT = "The quick brown fox jumps over the lazy dog."
#: Requests of each kind before anything is counted: connections, scripts and caches are there then.
WARM_UP = 20

Ask = Callable[[http.client.HTTPConnection], float]


class Bare(Server):
    """The bare path: gunicorn with one gevent worker, and one worker process."""

    def __init__(self, redis_url: str) -> None:
        port = free_port()
        env = {REDIS_URL: redis_url}
        command = [sys.executable, "-m", "gunicorn", "--worker-class=gevent", "--keep-alive=75", "--log-level=warning"]
        self._worker = subprocess.Popen([sys.executable, "-m", "benchmarks.bare", redis_url], cwd=_root())
        super().__init__(
            "bare",
            [*command, f"--bind=127.0.0.1:{port}", f"--chdir={_root()}", "benchmarks.bare:create_app()"],
            f"http://127.0.0.1:{port}",
            env,
        )

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(self.url, timeout=5):
                return True
        except OSError:
            return False

    def close(self) -> None:
        """End both processes."""
        super().close()
        self._worker.send_signal(signal.SIGKILL)
        self._worker.wait()


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def ask_bare(connection: http.client.HTTPConnection) -> float:
    """One request to the bare path; returns the seconds to its first token."""
    return _post(connection, "/", {"prompt": PROMPT}, b"data: {")


def ask_completions(connection: http.client.HTTPConnection) -> float:
    """One streamed completion; returns the seconds to its first chunk with text."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    return _post(connection, "/v1/completions", body, b"data: {")


def ask_chat(connection: http.client.HTTPConnection) -> float:
    """One streamed chat, about which a worker is asked first; returns the seconds to its first chunk with text."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "temperature": 0, "stream": True}
    return _post(connection, "/v1/chat/completions", body, b'"content":"', skip=1)


def ask_jobs(connection: http.client.HTTPConnection) -> float:
    """One job and its event stream, so two requests; returns the seconds to the first token."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/jobs", json.dumps(body), {"Content-Type": "application/json"})
    job = json.loads(connection.getresponse().read())
    connection.request("GET", job["links"]["events"])
    return _until(connection.getresponse(), b"event: token") - began


def _post(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any], first: bytes, skip: int = 0
) -> float:
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return _until(connection.getresponse(), first, skip) - began


def _until(response: http.client.HTTPResponse, first: bytes, skip: int = 0) -> float:
    """The moment at which a line with `first` is there, after `skip` such lines. What follows is read to its end."""
    while line := response.readline():
        if first in line:
            if not skip:
                moment = time.perf_counter()
                response.read()
                return moment
            skip -= 1
    raise RuntimeError(f"the answer ended without a token: status {response.status}")


def measure(kinds: Mapping[str, tuple[str, Ask]], requests: int, pause_s: float) -> dict[str, list[float]]:
    """The seconds to the first token, `requests` times each kind, by turns over connections that stay open."""
    connections = {
        name: http.client.HTTPConnection(urlsplit(url).netloc, timeout=30) for name, (url, _) in kinds.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(requests + WARM_UP):
        for name, (_, ask) in kinds.items():
            # What follows the answer of the one before (its record, for example) is not to be in the way of this one.
            time.sleep(pause_s)
            seconds = ask(connections[name])
            if number >= WARM_UP:
                taken[name].append(seconds)
    for connection in connections.values():
        connection.close()
    return taken


def figures(taken: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median and 90th percentile in ms, and the ratio of the medians to that of the bare path."""
    base = statistics.median(taken["bare"])
    return {
        name: {
            "p50_ms": round(statistics.median(seconds) * 1e3, 2),
            "p90_ms": round(statistics.quantiles(seconds, n=10)[-1] * 1e3, 2),
            "ratio": round(statistics.median(seconds) / base, 2),
        }
        for name, seconds in taken.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each kind")
    parser.add_argument("--pause-s", type=float, default=0.02, help="between two requests")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a Markdown table")
    given = parser.parse_args()
    with Slotline("fake:echo", 8, 8192, 0, {}) as ours, Bare(ours.redis_url) as bare:
        kinds = {
            "bare": (bare.url, ask_bare),
            "/v1/completions": (ours.url, ask_completions),
            "/v1/chat/completions": (ours.url, ask_chat),
            "/v1/jobs + events": (ours.url, ask_jobs),
        }
        found = figures(measure(kinds, given.requests, given.pause_s))
    if given.json:
        print(json.dumps(found))
        return
    print("| to the first token | p50 ms | p90 ms | ratio |\n| --- | --- | --- | --- |")
    for name, row in found.items():
        print(f"| {name} | {row['p50_ms']} | {row['p90_ms']} | {row['ratio']} |")


if __name__ == "__main__":
    main()
