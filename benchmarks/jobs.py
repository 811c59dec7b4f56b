"""Jobs a second: one-token jobs of the scripted model on 32 slots against RQ's `SimpleWorker` on jobs that do nothing.

    python -m benchmarks.jobs --jobs 1000 --rounds 5

Both work on one Valkey and take turns. All jobs of a round wait before its clock starts, and it stops when RQ counts
the last one as finished. Beside it stands the CPU time of a job by part, of the model process by thread (Linux).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import redis
from rq import Queue, SimpleWorker
from rq.registry import FinishedJobRegistry
from rq.serializers import JSONSerializer

from benchmarks.bare import nothing
from benchmarks.cpu import NAMED_THREADS
from benchmarks.servers import Slotline
from benchmarks.usage import cpu_by_part, cpu_since
from shared.jobs import JobStore
from shared.names import queue_name
from shared.schemas import JobRequest
from shared.settings import Settings, load

MODEL = "fake:echo"
SLOTS = 32
QUEUE = "nothing"
#: While this key is there no worker takes a job; it is what `rq suspend` sets.
SUSPENDED = "rq:suspended"
#: Jobs that are sent in one round trip.
PIPELINE = 250


def simple_worker(url: str) -> None:
    """Work the queue off in this process, as `rq worker --burst --worker-class rq.worker.SimpleWorker` does."""
    client = redis.Redis.from_url(url)
    worker = SimpleWorker([QUEUE], connection=client, serializer=JSONSerializer)
    began = time.perf_counter()
    worker.work(burst=True, logging_level="WARNING")
    print(json.dumps({"wall_s": time.perf_counter() - began, "cpu_s": time.process_time()}))


def rq_round(client: redis.Redis, url: str, jobs: int) -> dict[str, float]:
    """Jobs a second and CPU ms a job of `SimpleWorker`."""
    queue = Queue(QUEUE, connection=client, serializer=JSONSerializer)
    for at in range(0, jobs, PIPELINE):
        with client.pipeline() as pipe:
            for _ in range(min(PIPELINE, jobs - at)):
                queue.enqueue(nothing, pipeline=pipe)
            pipe.execute()
    command = [sys.executable, "-m", "benchmarks.jobs", "--simple-worker", url]
    done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=_root()).stdout)
    return {"jobs_per_s": jobs / done["wall_s"], "cpu_ms": done["cpu_s"] / jobs * 1e3}


def our_round(client: redis.Redis, store: JobStore, server: Slotline, jobs: int) -> dict[str, Any]:
    """Jobs a second of our worker, and CPU ms a job by part."""
    name = MODEL.replace(":", "-")
    request = JobRequest(prompt="The quick brown fox", max_tokens=1, temperature=0.0)
    finished = FinishedJobRegistry(queue_name(name, "normal"), connection=client)
    client.set(SUSPENDED, 1)
    before = finished.get_job_count(cleanup=False)
    for at in range(0, jobs, PIPELINE):
        store.submit_many([request] * min(PIPELINE, jobs - at), name)
    time.sleep(1)  # what ended before is recorded, and the doorbell has been answered
    used = cpu_by_part(server.process.pid)
    began = time.perf_counter()
    client.delete(SUSPENDED)
    store.submit(request, name)  # rings the doorbell
    while finished.get_job_count(cleanup=False) < before + jobs + 1:
        time.sleep(0.005)
    wall_s = time.perf_counter() - began
    parts = cpu_since(server.process.pid, used)
    return {"jobs_per_s": (jobs + 1) / wall_s, "cpu_ms": {name: s / jobs * 1e3 for name, s in parts.items()}}


def measure(jobs: int, rounds: int) -> dict[str, Any]:
    """Both by turns, `rounds` times."""
    settings = {"PYTHONPATH": NAMED_THREADS, "SLOTLINE_RESULT_TTL_S": "600"}
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, float]] = []
    with Slotline(MODEL, SLOTS, 8192, 0, settings) as server:
        client = redis.Redis.from_url(server.redis_url)
        store = JobStore(client, load(Settings, {"redis_url": server.redis_url}))
        our_round(client, store, server, 200)  # warm
        for _ in range(rounds):
            theirs.append(rq_round(client, server.redis_url, jobs))
            ours.append(our_round(client, store, server, jobs))
        client.close()
    return {
        "SimpleWorker jobs/s": _median([r["jobs_per_s"] for r in theirs]),
        "Slotline jobs/s": _median([r["jobs_per_s"] for r in ours]),
        "ratio": _median([a["jobs_per_s"] / b["jobs_per_s"] for a, b in zip(ours, theirs, strict=True)]),
        "SimpleWorker CPU ms": _median([r["cpu_ms"] for r in theirs]),
        "CPU ms": {name: _median([r["cpu_ms"].get(name, 0.0) for r in ours]) for name in ours[0]["cpu_ms"]},
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--simple-worker", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.simple_worker:
        simple_worker(given.simple_worker)
        return
    found = measure(given.jobs, given.rounds)
    if given.json:
        print(json.dumps(found))
        return
    cpu = found.pop("CPU ms")
    print(f"| {' | '.join(found)} |\n|{' --- |' * len(found)}\n| {' | '.join(map(str, found.values()))} |\n")
    print("| part | CPU ms a job |\n| --- | --- |")
    for name, value in sorted(cpu.items(), key=lambda item: -item[1]):
        if value >= 0.001:
            print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
