"""Users, and everything they depend on being killed under them, again and again.

    make chaos                           200 kills
    make chaos KILLS=20 SEED=7           fewer, and the same ones each time

A seeded schedule of `kill -9` on model processes, their parents, both, the web side, a process of it, the process of
batches and Valkey; of processes that stand still and go on, cuts of the network, swallowed replies, cancels and readers
that leave. The last line of the output is one JSON object; exit status 0 where nothing was lost, ended or started
twice, streamed with a gap or a repeat, or streamed differently from the result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import redis

from tests.chaos.audit import Audit
from tests.chaos.load import Users
from tests.chaos.stack import Stack, children, kill
from tests.proxy import RedisProxy

#: Longest that Valkey is away, a network cut, a process still and a replica behind, in seconds; a lease is 5.
AWAY_S, CUT_S, STILL_S, LAG_S = 4.0, 8.0, 9.0, 1.5

#: Requests whose replies are swallowed: those that submit, take, write and end jobs, and whatever comes next.
SWALLOWED = (b"EVALSHA", b"FCALL", b"XADD", b"SET", b"")


class Chaos:
    """Does one thing after another to a stack. Each returns how many processes it killed."""

    def __init__(self, stack: Stack, users: Users, chance: random.Random, left_out: Sequence[str] = ()) -> None:
        self._stack = stack
        self._users = users
        self._chance = chance
        self._later: list[threading.Timer] = []
        self.done: Counter[str] = Counter()
        #: What is done, and how often compared with the others.
        self._deeds: dict[Callable[[], int], int] = {
            self.kill_model: 6,
            self.kill_parent: 2,
            self.kill_model_and_parent: 3,
            self.kill_web: 1,
            self.kill_web_process: 3,
            self.kill_batches: 1,
            self.kill_valkey: 1,
            self.fail_over: 1,
            self.stand_still: 2,
            self.freeze: 1,
            self.cut: 1,
            self.swallow_a_reply: 3,
            self.cancel: 4,
        }
        self._deeds = {deed: weight for deed, weight in self._deeds.items() if deed.__name__ not in left_out}

    def go_on(self) -> int:
        """Do one thing, chosen by chance. Returns how many processes were killed."""
        (deed,) = self._chance.choices(list(self._deeds), list(self._deeds.values()))
        self.done[deed.__name__] += 1
        try:
            return deed()
        except (redis.RedisError, ProcessLookupError, IndexError):
            return 0  # nobody is there to be killed just now

    def finish(self) -> None:
        """Let everything that was stopped or cut go on."""
        for timer in self._later:
            timer.join()
        for proxy in self._stack.proxies.values():
            proxy.heal()

    def kill_model(self) -> int:
        worker, pid = self._chance.choice(sorted(self._stack.models().items()))
        self._stack.note_death(worker)
        return int(kill(pid))

    def kill_parent(self) -> int:
        return int(kill(self._stack.service(self._chance.choice(self._stack.workers())).process.pid))

    def kill_model_and_parent(self) -> int:
        models = self._stack.models()
        parent = self._stack.service(self._chance.choice(self._stack.workers())).process.pid
        pids = children(parent)
        killed = int(kill(parent))
        for worker, pid in models.items():
            if pid in pids:
                self._stack.note_death(worker)
        return killed + sum(map(kill, pids))

    def kill_web(self) -> int:
        parent = self._stack.service("web").process.pid
        pids = children(parent)
        return int(kill(parent)) + sum(map(kill, pids))

    def kill_web_process(self) -> int:
        return int(kill(self._chance.choice(children(self._stack.service("web").process.pid))))

    def kill_batches(self) -> int:
        return int(kill(self._stack.service("batches").process.pid))

    def kill_valkey(self) -> int:
        self._stack.store.kill_and_restart(self._chance.uniform(0, AWAY_S))
        return 1

    def stand_still(self) -> int:
        """A process that is not scheduled for some time, longer than its lease perhaps, and then goes on."""
        pid = self._chance.choice(sorted(self._stack.models().values()))
        os.kill(pid, signal.SIGSTOP)
        self._in(self._chance.uniform(0.5, STILL_S), lambda: _go_on(pid))
        return 0

    def fail_over(self) -> int:
        """The last second that Valkey said yes to is lost, except what waited for the replica."""
        self._stack.fail_over(self._chance.uniform(0.2, LAG_S))
        return 1

    def freeze(self) -> int:
        """A network that loses everything and closes nothing."""
        self._break(RedisProxy.freeze)
        return 0

    def cut(self) -> int:
        self._break(RedisProxy.cut)
        return 0

    def swallow_a_reply(self) -> int:
        proxy = self._proxy()
        proxy.drop_next_reply_to(self._chance.choice(SWALLOWED))
        return 0

    def cancel(self) -> int:
        self._users.cancel_one()
        return 0

    def _break(self, how: Callable[[RedisProxy], None]) -> None:
        proxy, began = self._proxy(), time.monotonic()
        how(proxy)

        def heal() -> None:
            proxy.heal()
            if proxy is self._stack.proxies["workers"]:
                self._stack.store.away.append((began, time.monotonic()))

        self._in(self._chance.uniform(0.5, CUT_S), heal)

    def _proxy(self) -> RedisProxy:
        return self._stack.proxies[self._chance.choice(["web", "workers"])]

    def _in(self, seconds: float, what: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, what)
        self._later.append(timer)
        timer.start()


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # it was killed meanwhile


def run(kills: int, seed: int, workers: int, users: int, pause_s: float, left_out: Sequence[str]) -> int:
    """Run it; returns the exit status."""
    chance = random.Random(seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slotline-chaos-") as folder:
        stack = Stack(Path(folder), workers)
        try:
            stack.start()
            load = Users(stack.url, users, seed)
            load.start()
            chaos = Chaos(stack, load, chance, left_out)
            killed = 0
            while killed < kills:
                time.sleep(chance.expovariate(1 / pause_s))
                killed += chaos.go_on()
                print(f"\r{killed} of {kills} killed, {len(load.jobs)} jobs", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            chaos.finish()
            load.stop()
            audit = Audit(faults=load.join(), forgotten=stack.store.forgotten)
            audit.lost += len(audit.faults)
            _until_batches_end(stack.url, load.batches)
            for job in load.jobs:
                audit.job(stack.client, stack.url, job)
            for number, batch in enumerate(load.batches):
                audit.batch(stack.url, number, batch)
            if stack.recovering:
                audit.lost += 1
                audit.faults.append(f"jobs are still held by what was killed: {sorted(stack.recovering)}")
            if not audit.is_clean():
                print(stack.logs(), file=sys.stderr)
        finally:
            stack.stop()
    print("\n".join(audit.faults), file=sys.stderr)
    result = {
        "kills": killed,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "gaps": audit.gaps,
        "mismatches": audit.mismatches,
        "recovery_p50_s": round(statistics.median(stack.recoveries), 2) if stack.recoveries else None,
        "recovery_max_s": round(max(stack.recoveries), 2) if stack.recoveries else None,
        "jobs": len(load.jobs),
        "cancelled": sum(job.cancelled_at is not None for job in load.jobs),
        "batches": len(load.batches),
        "deeds": dict(sorted(chaos.done.items())),
        "seed": seed,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return 0 if audit.is_clean() else 1


def _until_batches_end(url: str, batches: list[str]) -> None:
    import httpx

    deadline = time.monotonic() + 180
    for batch in batches:
        while time.monotonic() < deadline:
            answer = httpx.get(f"{url}/v1/batches/{batch}", timeout=30)
            if answer.status_code == 404:
                break  # the audit says so
            if answer.status_code == 200 and answer.json()["status"] in ("completed", "failed", "cancelled", "expired"):
                break
            time.sleep(0.5)


def _end(*_: object) -> None:
    """So that whoever ends this leaves nothing running; a second signal must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("ended")


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="workers, each with a model process")
    parser.add_argument("--users", type=int, default=12, help="users at once")
    parser.add_argument("--leave-out", action="append", default=[], help="a deed by name, as in fail_over")
    parser.add_argument("--pause-s", type=float, default=1.0, help="time between two deeds, on average")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    return run(given.kills, given.seed, given.workers, given.users, given.pause_s, given.leave_out)


if __name__ == "__main__":
    raise SystemExit(main())
