"""Whether leases are trusted, on a clock of the test's own, and what is done with the jobs of the dead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import redis
from redis.exceptions import OutOfMemoryError

from shared.jobs import JobStore
from shared.names import lease_key
from shared.settings import WorkerSettings, load
from shared.work import ALONE_AFTER_CRASHES, MOST_CRASHES
from tests.shared.world import World
from worker import recovery
from worker.recovery import Recovery


class Clocks:
    """Time as a machine tells it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.slept


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=found.monotonic, time=found.time))
    return found


@pytest.fixture
def worker_settings(valkey: str) -> WorkerSettings:
    return load(WorkerSettings, {"model_path": "fake:echo", "redis_url": valkey, "lease_s": 5, "redis_timeout_s": 3})


@pytest.fixture
def keeper(clocks: Clocks, store: JobStore, worker_settings: WorkerSettings) -> Recovery:
    return Recovery(store, worker_settings, "keeper")


@pytest.fixture
def world(store: JobStore, client: redis.Redis) -> World:
    return World(store, client)


def rounds(keeper: Recovery, clocks: Clocks, seconds: float, takes_s: float = 0.0) -> None:
    """Go round once a second for so long."""
    for _ in range(int(seconds)):
        keeper.begin_round()
        clocks.now += takes_s
        keeper.end_round()
        clocks.now += 1 - takes_s


def test_leases_are_trusted_once_redis_was_well_for_as_long_as_one_lasts(keeper: Recovery, clocks: Clocks) -> None:
    assert not keeper.is_healthy and not keeper.trusts_leases
    rounds(keeper, clocks, 5)
    assert keeper.is_healthy and keeper.trusts_leases
    keeper.note_outage()
    assert not keeper.is_healthy and not keeper.trusts_leases
    rounds(keeper, clocks, 4)
    assert keeper.is_healthy and not keeper.trusts_leases
    rounds(keeper, clocks, 1)
    assert keeper.trusts_leases


def test_somebody_who_has_yet_to_notice_that_he_was_cut_off_has_the_time_to(
    clocks: Clocks, store: JobStore, worker_settings: WorkerSettings
) -> None:
    keeper = Recovery(store, worker_settings.model_copy(update={"redis_timeout_s": 20.0}))
    rounds(keeper, clocks, 20)
    assert not keeper.trusts_leases
    rounds(keeper, clocks, 1)
    assert keeper.trusts_leases


def test_a_redis_that_stood_still_within_one_round_is_not_trusted(keeper: Recovery, clocks: Clocks) -> None:
    rounds(keeper, clocks, 6)
    keeper.begin_round()
    clocks.now += 4  # and then it answered, without an error
    assert not keeper.trusts_leases, "while the round is not over"
    keeper.end_round()
    keeper.begin_round()
    keeper.end_round()
    assert keeper.is_healthy and not keeper.trusts_leases
    rounds(keeper, clocks, 5)
    assert keeper.trusts_leases


@pytest.mark.parametrize("monotonic_stands", [True, False], ids=["machine suspended", "process stopped"])
def test_somebody_who_has_slept_trusts_nothing_at_first(
    monotonic_stands: bool, keeper: Recovery, clocks: Clocks
) -> None:
    rounds(keeper, clocks, 6)
    if monotonic_stands:
        clocks.slept += 3600
    else:
        clocks.now += 3600
    keeper.begin_round()
    keeper.end_round()
    assert not keeper.trusts_leases
    rounds(keeper, clocks, 5)
    assert keeper.trusts_leases


def test_nothing_is_taken_back_on_leases_that_are_not_trusted(keeper: Recovery, clocks: Clocks, world: World) -> None:
    pulled = world.take("w1")
    rounds(keeper, clocks, 4)
    assert keeper.take_back() == [] and world.waiting() == []
    rounds(keeper, clocks, 1)
    assert keeper.take_back() == [] and world.waiting() == [pulled.record.id]


def test_a_redis_that_takes_no_writes_is_found_out(
    keeper: Recovery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.check_writable("parent")
    assert client.pttl(lease_key("parent")) > 0
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            keeper.check_writable("parent")
    finally:
        client.config_set("maxmemory", 0)


# --- jobs whose process dies again and again ---


def crash(world: World, keeper: Recovery, worker: str, *, says: int = 0) -> str:
    """Pull the next job, let it say something, and let its process die while it works on it; its id."""
    (pulled,) = world.pull(worker)
    so_far = len(world.store.stream.tokens(pulled.record.id))
    world.say(pulled, *["x"] * says, start=so_far)
    keeper.bury(worker, [pulled.execution])
    return pulled.record.id


def test_the_third_crash_without_a_token_in_between_fails_the_job(keeper: Recovery, world: World) -> None:
    job_id = world.submit(retries=5)
    for number in range(1, MOST_CRASHES):
        assert crash(world, keeper, f"w{number}") == job_id
        record = world.store.fetch(job_id)
        assert (record.crashes, record.rq_status, record.retries_left) == (number, "queued", 5)
    crash(world, keeper, "last")
    shown = world.store.view(job_id)
    assert (shown["status"], shown["error"]["code"]) == ("failed", "worker_lost")
    assert f"died {MOST_CRASHES} times" in shown["error"]["message"]
    assert world.events(job_id) == ["failed"] and world.waiting() == []


def test_a_job_that_gains_a_token_between_crashes_is_never_failed(keeper: Recovery, world: World) -> None:
    job_id = world.submit()
    for number in range(10):
        crash(world, keeper, f"w{number}", says=1)
        assert world.store.fetch(job_id).crashes == 0
    for number in range(2):
        crash(world, keeper, f"v{number}")
    assert world.store.fetch(job_id).crashes == 2
    crash(world, keeper, "v2", says=1)
    assert world.store.fetch(job_id).crashes == 0


def test_a_job_that_was_not_at_work_is_not_to_blame(keeper: Recovery, world: World) -> None:
    jobs = [world.submit() for _ in range(2)]
    for number in range(5):
        at_work, other = world.pull(f"w{number}", count=2)
        keeper.bury(f"w{number}", [other.execution] if number < 2 else [])
    assert [world.store.fetch(job_id).crashes for job_id in jobs] == [0, 2]


def test_a_job_that_is_to_run_alone_is_pulled_alone(keeper: Recovery, world: World) -> None:
    poison = world.submit()
    for number in range(ALONE_AFTER_CRASHES):
        crash(world, keeper, f"w{number}")
    before = world.submit(priority="interactive")
    world.submit()
    assert [p.record.id for p in world.pull("w", count=9)] == [before, poison]
    assert len(world.waiting()) == 1


def test_the_end_of_a_job_that_died_too_often_is_recorded_by_the_next_to_come(keeper: Recovery, world: World) -> None:
    job_id = world.submit()
    for number in range(MOST_CRASHES):
        crash(world, keeper, f"w{number}")
    assert world.store.fetch(job_id).rq_status == "started"
    assert world.store.reclaim("w").committed == [job_id]
    assert world.held("w") == [job_id]


def test_an_end_that_was_not_committed_is_committed_by_the_next_to_come(
    keeper: Recovery, world: World, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = world.submit()
    for number in range(MOST_CRASHES - 1):
        crash(world, keeper, f"w{number}")
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "_fail", lambda doomed: None)  # it dies just before that
        crash(world, keeper, "last")
    assert world.store.view(job_id)["status"] == "running" and world.waiting() == []
    rounds(keeper, clocks, 6)
    keeper.take_back()
    assert world.store.view(job_id)["error"]["code"] == "worker_lost"


def test_a_cancelled_job_that_died_too_often_ends_as_cancelled(keeper: Recovery, world: World) -> None:
    job_id = world.submit()
    for number in range(MOST_CRASHES - 1):
        crash(world, keeper, f"w{number}")
    (pulled,) = world.pull("last")
    assert world.store.cancel(job_id)["status"] == "cancelled"
    keeper.bury("last", [pulled.execution])
    assert world.store.view(job_id)["status"] == "cancelled" and world.events(job_id) == ["done"]


def test_a_retry_by_hand_begins_to_count_anew(keeper: Recovery, world: World) -> None:
    job_id = world.submit()
    for number in range(MOST_CRASHES):
        crash(world, keeper, f"w{number}")
    world.client.hset(f"rq:job:{job_id}", "status", "failed")
    world.store.retry(job_id)
    assert world.store.fetch(job_id).crashes == 0


def test_what_a_worker_held_is_given_back_though_its_lease_lasts(keeper: Recovery, world: World) -> None:
    world.store.renew_lease("w1", 600)
    pulled = world.take("w1")
    keeper.bury("w1", [])
    assert world.waiting() == [pulled.record.id]
    assert not world.client.exists("slotline:lease:w1")
