from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.batches import process as processes
from shared.batches.process import EXIT_CONFIG, EXIT_REDIS, Process, check, run
from shared.batches.runner import Runner
from shared.names import batch_lease_key
from shared.settings import BatchSettings, load
from tests.shared.batches.running import Batches, line
from tests.shared.world import QUEUES, until

MakeBatches = Callable[..., Batches]


@pytest.fixture
def make(client: redis.Redis, valkey: str, tmp_path: Path) -> MakeBatches:
    return lambda **settings: Batches(client, valkey, tmp_path, **{"now": time.time} | settings)


@pytest.fixture
def batches(make: MakeBatches) -> Batches:
    return make(batch_lease_s=0.4)


@contextmanager
def at_work(batches: Batches, *others: Batches) -> Iterator[list[Process]]:
    """Processes that run batches, on threads, stopped at the end."""
    started = [Process(b.settings, b.storage) for b in (batches, *others)]  # type: ignore[arg-type]
    threads = [threading.Thread(target=process.run) for process in started]
    for thread in threads:
        thread.start()
    try:
        yield started
    finally:
        for process, thread in zip(started, threads, strict=True):
            process.stop()
            thread.join(timeout=20)
            assert not thread.is_alive()


def serve_until(batches: Batches, *batch_ids: str, status: str = "completed") -> None:
    def are_there() -> bool:
        batches.model.serve()
        return all(batches.get(batch_id).status == status for batch_id in batch_ids)

    until(are_there)


def test_batches_that_come_are_run_many_at_once(batches: Batches) -> None:
    with at_work(batches):
        ids = [batches.submit([line(f"{name}-{n}") for n in range(20)]) for name in "abcde"]
        serve_until(batches, *ids)
    for name, batch_id in zip("abcde", ids, strict=True):
        assert batches.texts(batch_id) == {f"id-{name}-{n}": f"text {name}-{n}" for n in range(20)}
        assert batches.left_in_redis(batch_id) == set()


def test_two_processes_share_the_batches_and_run_nothing_twice(batches: Batches, make: MakeBatches) -> None:
    ids = [batches.submit([line(n) for n in range(30)]) for _ in range(4)]
    with at_work(batches, make(batch_lease_s=0.4)):
        serve_until(batches, *ids)
    for batch_id in ids:
        assert len(batches.texts(batch_id)) == 30
    assert len(batches.model.served) == len(set(batches.model.served)) == 120


def test_no_more_run_at_once_than_may(make: MakeBatches) -> None:
    batches = make(batches_at_once=1)
    ids = [batches.submit([line(1)]) for _ in range(2)]
    with at_work(batches):
        until(lambda: batches.world.waiting(QUEUES[-1]))
        assert sorted(batches.get(batch_id).status for batch_id in ids) == ["in_progress", "validating"]
        serve_until(batches, *ids)
    assert [batches.counts(batch_id) for batch_id in ids] == [(1, 0, 1)] * 2


def test_stopping_writes_what_there_is_and_gives_the_lease_up_at_once(make: MakeBatches) -> None:
    batches = make(batch_lease_s=60)
    batch_id = batches.submit([line(n) for n in range(4)])
    with at_work(batches):
        until(lambda: len(batches.world.waiting(QUEUES[-1])) == 4)
        assert batches.client.exists(batch_lease_key(batch_id))
        batches.model.serve(2)
    assert batches.counts(batch_id) == (2, 0, 4)
    assert not batches.client.exists(batch_lease_key(batch_id))
    with at_work(batches):
        serve_until(batches, batch_id)
    assert len(batches.texts(batch_id)) == 4


def test_a_batch_whose_process_died_is_taken_over_when_its_lease_runs_out(batches: Batches) -> None:
    batch_id = batches.submit([line(n) for n in range(4)])
    fence = batches.store.acquire(batch_id, "dead", 0.2)
    with at_work(batches):
        serve_until(batches, batch_id)
    assert len(batches.texts(batch_id)) == 4 and fence == 1


def test_a_batch_that_is_paused_has_no_runner_until_it_is_resumed(make: MakeBatches) -> None:
    batches = make(batches_at_once=1, batch_lease_s=60)
    paused = batches.submit([line(n) for n in range(3)])
    with at_work(batches):
        until(lambda: len(batches.world.waiting(QUEUES[-1])) == 3)
        batches.store.pause(paused)
        other = batches.submit([line(1)])
        until(lambda: batches.world.waiting(QUEUES[-1]) == [f"{other}-1-0"])
        serve_until(batches, other)
        batches.store.resume(paused)
        serve_until(batches, paused)
    assert len(batches.texts(paused)) == 3 and len(batches.model.served) == 4


def test_a_batch_that_is_cancelled_while_paused_ends(batches: Batches) -> None:
    batch_id = batches.submit([line(n) for n in range(3)])
    batches.store.pause(batch_id)
    with at_work(batches):
        batches.store.cancel(batch_id)
        until(lambda: batches.get(batch_id).status == "cancelled")
    assert batches.counts(batch_id) == (0, 3, 3)


def test_a_runner_that_breaks_takes_nothing_with_it(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, well = batches.submit([line(1)]), batches.submit([line(2)])
    whole, broke = Runner.run, 0

    def run_or_break(runner: Runner) -> None:
        nonlocal broke
        if runner._id == broken and not broke:
            broke += 1
            raise ZeroDivisionError
        whole(runner)

    monkeypatch.setattr(Runner, "run", run_or_break)
    monkeypatch.setattr(processes, "BROKEN_S", 0.1)
    with at_work(batches):
        serve_until(batches, well, broken)
    assert broke == 1 and "its runner broke" in caplog.text


def test_what_has_expired_is_swept(make: MakeBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SWEEP_S", 0.0)
    batches = make(now=lambda: 1_000_000.0)  # far in the past
    with batches.files.upload() as upload:
        upload.write(b"old")
    file = batches.files.register(upload, "old.jsonl", ttl_s=1)
    with at_work(batches):
        until(lambda: not batches.client.exists(f"slotline:file:{file.id}"))
    assert batches.storage.list("files") == []


def test_a_process_that_lives_is_seen_by_the_health_check(batches: Batches) -> None:
    assert check(batches.settings) == []
    with at_work(batches) as (process,):
        until(lambda: check(batches.settings) == [process.name])


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ({"redis_url": "redis://127.0.0.1:9/0", "redis_wait_s": 0}, EXIT_REDIS, "no answer from Redis"),
        ({"files_url": "nosuch://bucket"}, EXIT_CONFIG, "nosuch"),
    ],
)
def test_what_it_cannot_do_without_is_one_line_and_a_status(
    valkey: str, settings: dict[str, Any], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(load(BatchSettings, {"redis_url": valkey} | settings)) == status
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith("slotline batches: ") and message in complaint
