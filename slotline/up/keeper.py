"""The processes of an embedded `slotline batch run`, kept by one that ends them when the run is gone, however it went.

The run holds the other end of the keeper's standard input. When that closes, also by `kill -9`, the keeper
stops the worker and Valkey and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from slotline.up.leftovers import MARK, end, find_marked, mark
from slotline.up.processes import Child
from slotline.up.server import start_server

#: How long the worker gets to unload its model, and how often it is asked; asked twice, it hands its jobs back at once.
STOP_S, ASK_AGAIN_S = 10.0, 0.5

#: How often Valkey is looked after.
LOOK_S = 0.5


def keep() -> int:
    """Start Valkey and a worker, say on standard output where they are, and stop them at the end of standard input.

    Returns 0, or the exit status of the worker if it ended by itself.
    """
    # Only the end of standard input stops us: a terminal's signals are the run's to answer. The children begin with
    # the defaults, which they would not if these were ignored instead.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="slotline-batch-") as folder:
        server = start_server(Path(folder), durable=False)
        env = {"SLOTLINE_REDIS_URL": server.url, MARK: mark("worker", Path(folder))}
        worker = Child("worker", env, _relay, lambda child: over.set())
        try:
            worker.start()
            print(json.dumps({"redis_url": server.url, "valkey": server.pid, "folder": folder}), flush=True)
            threading.Thread(target=_read_to_the_end, args=(over,), daemon=True).start()
            while not over.wait(LOOK_S):
                if server.process.poll() is not None:
                    _relay("valkey", "Valkey ended unexpectedly")
                    return 1
            return worker.status or 0
        finally:
            _stop(worker)
            end_worker(folder)
            server.process.kill()
            server.process.wait()


def end_worker(folder: str) -> None:
    """End whatever is left of the worker of a keeper, such as a model process without a parent."""
    end(find_marked(Path(folder), ["worker"]))


def _read_to_the_end(over: threading.Event) -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    over.set()


def _relay(name: str, line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _stop(worker: Child) -> None:
    deadline = time.monotonic() + STOP_S
    while worker.is_running and time.monotonic() < deadline:
        worker.terminate()
        worker.join(ASK_AGAIN_S)
    worker.end_group(signal.SIGKILL)
