"""Cancel, retry and erase, and their races with a worker."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import Any

import pytest
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, DeferredJobRegistry, FailedJobRegistry, ScheduledJobRegistry

from shared.errors import JobAlreadyEnded, JobNotEnded, JobNotFound
from shared.jobs import JobStore
from shared.names import JOB_FUNCTION
from shared.reading import Said
from shared.records import JobRecord
from shared.results import JobObject
from shared.schemas import JobRequest
from shared.stream import Append, Event, EventId, dumps
from tests.shared.world import MODEL, NORMAL, World, end_of

# --- where it waits ---


def queued(world: World) -> str:
    return world.submit()


def scheduled(world: World) -> str:
    return world.submit(delay_s=1000)


def deferred(world: World) -> str:
    return world.submit(depends_on=world.submit())


def by_plain_rq(world: World) -> str:
    return world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}).id


WAITING = [queued, scheduled, deferred, by_plain_rq]


@pytest.mark.parametrize("waiting", WAITING)
def test_a_waiting_job_is_cancelled_at_once(waiting: Callable[[World], str], world: World) -> None:
    job_id = waiting(world)
    shown = world.store.cancel(job_id)
    JobObject.model_validate_json(json.dumps(shown))
    assert (shown["status"], shown["detail"], shown["finish_reason"]) == ("cancelled", "canceled", "cancelled")
    assert shown["expires_at"] - shown["ended_at"] == pytest.approx(86_400)
    assert world.events(job_id) == ["done"]
    assert world.store.view(job_id) == shown
    assert job_id not in world.waiting()
    assert job_id not in ScheduledJobRegistry(NORMAL, world.client)
    assert job_id not in DeferredJobRegistry(NORMAL, world.client)
    assert job_id in CanceledJobRegistry(NORMAL, world.client)
    job = world.job(job_id)
    assert job.get_status() == JobStatus.CANCELED
    assert job.ended_at is not None
    assert job.ended_at.timestamp() == pytest.approx(shown["ended_at"], abs=1e-6)


@pytest.mark.parametrize("waiting", WAITING)
def test_cancelling_twice_changes_nothing(waiting: Callable[[World], str], world: World) -> None:
    job_id = waiting(world)
    first = world.store.cancel(job_id)
    record = world.client.hgetall(f"rq:job:{job_id}")
    assert world.store.cancel(job_id) == first
    assert world.client.hgetall(f"rq:job:{job_id}") == record
    assert world.events(job_id) == ["done"]


def test_a_cancelled_job_and_its_log_are_kept_as_long_as_a_result(world: World) -> None:
    job_id = world.submit(result_ttl_s=77, depends_on=world.submit())
    world.store.cancel(job_id)
    for key in (f"rq:job:{job_id}", f"slotline:events:{job_id}", world.job(job_id).dependencies_key):
        assert 0 < world.client.ttl(key) <= 77, key


def test_a_job_that_rq_keeps_for_ever_is_kept_when_it_is_cancelled(world: World) -> None:
    job = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"}, result_ttl=-1)
    shown = world.store.cancel(job.id)
    assert (shown["status"], shown["expires_at"]) == ("cancelled", None)
    assert world.client.ttl(job.key) == -1
    assert world.events(job.id) == ["done"]


def test_a_job_cancelled_after_it_was_handed_back_keeps_its_text(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a", "b")
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    shown = world.store.cancel(pulled.record.id)
    assert (shown["status"], shown["text"]) == ("cancelled", "ab")
    assert world.events(pulled.record.id) == ["token", "token", "done"]


def test_what_a_worker_adds_between_the_look_and_the_cancel_is_part_of_the_text(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, look = world.submit(), world.store.said

    def late(record: JobRecord) -> Said:
        found = look(record)
        if record.attempts < 3:
            (pulled,) = world.pull()
            world.say(pulled, "x", start=record.attempts)
            world.store.hand_back("w1", [(job_id, pulled.execution)])
        return found

    monkeypatch.setattr(world.store, "said", late)
    assert world.store.cancel(job_id)["text"] == "xxx"
    assert world.store.stream.last(job_id).json()["text"] == "xxx"
    assert world.events(job_id) == ["token"] * 3 + ["done"]


def test_so_it_is_for_many_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, look = [world.submit() for _ in range(3)], world.store.said

    def late(record: JobRecord) -> Said:
        found = look(record)
        if record.id == ids[1] and not record.attempts:
            pulled = world.pull(count=3)
            world.say(pulled[1], "x")
            world.store.hand_back("w1", [(p.record.id, p.execution) for p in pulled])
        return found

    monkeypatch.setattr(world.store, "said", late)
    world.store.cancel_many(ids)
    assert [world.store.view(i)["text"] for i in ids] == [None, "x", None]
    assert [world.events(i)[-1] for i in ids] == ["done"] * 3


def test_a_job_requeued_with_rq_after_its_end_is_cancelled_without_the_text_of_its_last_life(world: World) -> None:
    job_id = failed(world)
    world.job(job_id).requeue()
    assert world.store.cancel(job_id)["text"] is None


def test_a_job_requeued_with_rq_and_cancelled_before_it_runs_has_one_end(world: World) -> None:
    job_id = failed(world)
    world.job(job_id).requeue()
    world.store.cancel(job_id)
    assert world.store.view(job_id)["status"] == "cancelled"
    assert world.events(job_id) == ["done"]


# --- while it runs ---


def test_a_running_job_is_flagged_and_its_worker_told(world: World) -> None:
    pulled = world.take("w1")
    with world.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe("rq:pubsub:w1")
        channel.get_message(timeout=5)
        shown = world.store.cancel(pulled.record.id)
        message = channel.get_message(timeout=5)
    assert (shown["status"], shown["detail"], shown["ended_at"]) == ("cancelled", "cancelling", None)
    assert json.loads(message["data"]) == {"command": "slotline-cancel", "job_id": pulled.record.id}
    assert world.field(pulled.record.id, "status") == "started"
    assert world.events(pulled.record.id) == []


def test_cancelling_a_running_job_twice_is_fine_before_and_after_its_worker_lets_go(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a")
    for _ in range(2):
        assert world.store.cancel(pulled.record.id)["detail"] == "cancelling"
    world.end(pulled, "cancelled", tokens=1)
    final = world.store.view(pulled.record.id)
    assert world.store.cancel(pulled.record.id) == final
    assert world.events(pulled.record.id) == ["token", "done"]


def test_a_cancel_that_was_promised_holds_when_the_worker_hands_the_job_back(world: World) -> None:
    pulled = world.take("w1")
    world.store.cancel(pulled.record.id)
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    assert world.store.view(pulled.record.id)["status"] == "cancelled"
    (again,) = world.pull("w2")
    assert again.record.cancelling
    assert world.end(again) == "cancelled"


def test_a_cancel_that_was_promised_holds_when_the_worker_dies(world: World) -> None:
    pulled = world.take("w1")
    world.store.cancel(pulled.record.id)
    world.store.renew_lease("w1", 100)
    world.client.delete("slotline:lease:w1")
    world.store.reclaim("w2")
    assert world.store.view(pulled.record.id)["status"] == "cancelled"
    (again,) = world.pull("w2")
    assert world.end(again) == "cancelled"


def test_a_job_that_was_handed_back_with_a_promised_cancel_can_be_cancelled_at_once(world: World) -> None:
    pulled = world.take("w1")
    world.store.cancel(pulled.record.id)
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    assert world.store.cancel(pulled.record.id)["detail"] == "canceled"
    assert world.pull() == []


@pytest.mark.parametrize("status", ["queued", "scheduled", "deferred", "ready_to_enqueue"])
def test_a_promised_cancel_shows_wherever_the_job_waits(status: str, world: World) -> None:
    pulled = world.take("w1")
    world.store.cancel(pulled.record.id)
    world.client.hset(f"rq:job:{pulled.record.id}", "status", status)
    assert (world.store.view(pulled.record.id)["status"], world.store.view(pulled.record.id)["detail"]) == (
        "cancelled",
        "cancelling",
    )


def test_handing_back_says_which_jobs_are_to_be_cancelled(world: World) -> None:
    kept, flagged = world.take(), world.take()
    world.store.cancel(flagged.record.id)
    jobs = [(p.record.id, p.execution) for p in (kept, flagged)]
    assert world.store.hand_back("w1", jobs) == [flagged.record.id]
    assert world.store.hand_back("w1", jobs) == []


# --- when it is over ---


def completed(world: World, recorded: bool = True) -> str:
    pulled = world.take()
    world.say(pulled, "x")
    world.end(pulled, "completed", tokens=1)
    if recorded:
        world.record(pulled, JobStatus.FINISHED)
    return pulled.record.id


def failed(world: World, recorded: bool = True) -> str:
    pulled = world.take()
    world.say(pulled, "x")
    world.end(pulled, "failed", tokens=1)
    if recorded:
        world.record(pulled, JobStatus.FAILED)
    return pulled.record.id


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "committed"])
@pytest.mark.parametrize(("make", "status"), [(completed, "completed"), (failed, "failed")])
def test_an_ended_job_cannot_be_cancelled(make: Any, status: str, recorded: bool, world: World) -> None:
    job_id = make(world, recorded)
    before = world.store.view(job_id)
    with pytest.raises(JobAlreadyEnded, match=f"it is {status}") as caught:
        world.store.cancel(job_id)
    assert caught.value.param == "id"
    assert world.store.view(job_id) == before
    assert before["status"] == status


def test_a_job_that_rq_cancelled_or_stopped_counts_as_cancelled(world: World) -> None:
    job_id = world.submit()
    world.job(job_id).cancel()
    assert world.store.cancel(job_id)["status"] == "cancelled"
    pulled = world.take()
    world.record(pulled, JobStatus.STOPPED)
    assert world.store.cancel(pulled.record.id)["status"] == "cancelled"


@pytest.mark.parametrize("call", [JobStore.cancel, JobStore.erase, JobStore.retry, JobStore.view, JobStore.fetch])
def test_a_job_that_never_was_is_not_found(call: Callable[[JobStore, str], Any], world: World) -> None:
    with pytest.raises(JobNotFound, match="'nobody'"):
        call(world.store, "nobody")
    assert world.keys() == set()


# --- races ---


def test_once_cancel_has_answered_the_job_always_ends_cancelled(world: World) -> None:
    """60 rounds of 5 jobs; a worker pulls, generates, gives back or dies, and commits while a caller cancels."""
    rng = random.Random(7)
    outcomes: list[bool] = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(60):
            ids = [world.submit() for _ in range(5)]
            barrier = Barrier(2)
            working = pool.submit(_work, world, barrier, random.Random(rng.random()))
            cancelled = pool.submit(_cancel_all, world, barrier, ids, rng).result(timeout=30)
            working.result(timeout=30)
            for job_id in ids:
                shown = world.store.view(job_id)
                events = world.events(job_id)
                assert shown["status"] == ("cancelled" if job_id in cancelled else "completed"), job_id
                assert world.store.fetch(job_id).is_over
                assert events[-1] == "done"
                assert events.count("done") == 1
                text = "".join(t["text"] for t in world.store.stream.tokens(job_id))
                assert (shown["text"] or "") == text in ("", "x", "xx")
            outcomes += [job_id in cancelled for job_id in ids]
    assert set(outcomes) == {True, False}


def _work(world: World, barrier: Barrier, rng: random.Random) -> None:
    """Do what workers do until the queue is empty."""
    barrier.wait(timeout=10)
    while pulled := world.pull(count=2):
        for p in pulled:
            world.say(p, *["x"] * rng.randrange(3))
        end = rng.randrange(4)
        if end == 0:
            jobs = [(p.record.id, p.execution) for p in pulled]
            world.store.cancel_many(world.store.hand_back("w1", jobs))
            continue
        if end == 1:
            world.store.cancel_many(world.store.reclaim("w2").cancelled)
            continue
        for p in pulled:
            world.say(p, "x", "x")
        outcomes = world.store.commit([end_of(p, tokens=2) for p in pulled])
        again = [end_of(p, "cancelled", tokens=2) for p, o in zip(pulled, outcomes, strict=True) if o == "cancelled"]
        assert set(world.store.commit(again)) <= {"ok"}


def _cancel_all(world: World, barrier: Barrier, ids: list[str], rng: random.Random) -> set[str]:
    """Cancel each job; the ids of those for which it was promised."""
    barrier.wait(timeout=10)
    promised = set()
    for job_id in rng.sample(ids, len(ids)):
        for _ in range(rng.randrange(6)):
            world.client.ping()
        with suppress(JobAlreadyEnded):  # then nothing was promised
            assert world.store.cancel(job_id)["status"] == "cancelled"
            promised.add(job_id)
    return promised


@pytest.mark.parametrize("running", [True, False], ids=["running", "waiting"])
def test_eight_cancels_at_once_end_a_job_once(running: bool, world: World) -> None:
    pulled = world.take() if running else None
    job_id = pulled.record.id if pulled else world.submit()
    barrier = Barrier(8)

    def cancel(_: int) -> str:
        barrier.wait(timeout=10)
        return str(world.store.cancel(job_id)["status"])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(cancel, range(8))) == {"cancelled"}
    if pulled:
        assert world.end(pulled, "cancelled") == "ok"
    assert world.events(job_id) == ["done"]


# --- retry ---


@pytest.mark.parametrize("make", [failed, lambda w: _cancelled(w), lambda w: _stopped(w)], ids=["f", "c", "s"])
def test_a_retried_job_runs_from_the_start(make: Callable[[World], str], world: World) -> None:
    job_id = make(world)
    shown = world.store.retry(job_id)
    assert (shown["status"], shown["text"], shown["ended_at"], shown["position"]) == ("queued", None, None, 1)
    assert world.events(job_id) == []
    assert world.waiting() == [job_id]
    assert world.client.ttl(f"rq:job:{job_id}") == -1
    assert job_id not in FailedJobRegistry(NORMAL, world.client)
    assert job_id not in CanceledJobRegistry(NORMAL, world.client)
    (pulled,) = world.pull()
    world.say(pulled, "new")
    assert world.end(pulled, tokens=1) == "ok"
    assert world.store.stream.tokens(job_id) == [{"index": 0, "text": "new", "token": 7}]


def _cancelled(world: World) -> str:
    job_id = world.submit()
    world.store.cancel(job_id)
    return job_id


def _stopped(world: World) -> str:
    pulled = world.take()
    world.say(pulled, "x")
    world.end(pulled, "cancelled", tokens=1)
    world.record(pulled, JobStatus.STOPPED)
    return pulled.record.id


def test_a_retry_wakes_a_worker(world: World) -> None:
    job_id = failed(world)
    world.client.delete(f"slotline:doorbell:{MODEL}:normal")
    world.store.retry(job_id)
    assert world.client.llen(f"slotline:doorbell:{MODEL}:normal") == 1


@pytest.mark.parametrize(
    "make",
    [queued, scheduled, completed, lambda w: w.take().record.id, lambda w: failed(w, recorded=False)],
    ids=["queued", "scheduled", "completed", "running", "committed"],
)
def test_only_what_has_failed_or_was_cancelled_is_retried(make: Callable[[World], str], world: World) -> None:
    job_id = make(world)
    before = world.client.hgetall(f"rq:job:{job_id}"), world.waiting(), world.events(job_id)
    with pytest.raises(JobAlreadyEnded if make is completed else JobNotEnded):
        world.store.retry(job_id)
    assert (world.client.hgetall(f"rq:job:{job_id}"), world.waiting(), world.events(job_id)) == before


def test_of_eight_retries_at_once_one_queues_the_job(world: World) -> None:
    job_id = failed(world)
    barrier = Barrier(8)

    def retry(_: int) -> bool:
        barrier.wait(timeout=10)
        try:
            world.store.retry(job_id)
        except JobNotEnded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(retry, range(8))) == 1
    assert world.waiting() == [job_id]


def test_a_worker_that_missed_the_end_cannot_write_to_the_retried_job(world: World) -> None:
    pulled = world.take("w1")
    world.job(pulled.record.id).cancel()
    world.store.retry(pulled.record.id)
    assert world.say(pulled, "stale") == [pulled.execution]
    assert world.end(pulled) == "lost"


# --- erase ---

#: Keys that say nothing of any one job: the queues and workers there are, bells rung for new jobs, and their count.
COUNTERS = {
    f"slotline:queues:{MODEL}",
    "rq:queues",
    f"slotline:doorbell:{MODEL}:normal",
    f"slotline:tickets:{NORMAL}",
    "slotline:workers",
}


def with_a_key(world: World) -> str:
    return world.store.submit(JobRequest(prompt="a secret"), MODEL, idempotency="key").job_id


def cancelled(world: World) -> str:
    return _cancelled(world)


def stopped(world: World) -> str:
    return _stopped(world)


@pytest.mark.parametrize(
    "make",
    [queued, scheduled, by_plain_rq, with_a_key, completed, failed, cancelled, stopped],
    ids=lambda f: f.__name__,
)
def test_an_erased_job_leaves_no_key_behind(make: Callable[[World], str], world: World) -> None:
    job_id = make(world)
    world.store.erase(job_id)
    assert world.keys() - COUNTERS == set()
    for call in (world.store.view, world.store.cancel, world.store.erase):
        with pytest.raises(JobNotFound):
            call(job_id)


def test_an_erased_running_job_leaves_only_the_workers_list_of_what_it_holds(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a", "b")
    world.store.erase(pulled.record.id)
    assert world.keys() - COUNTERS == {"slotline:held:w1"}
    assert world.say(pulled, "c", start=2) == [pulled.execution]
    assert world.end(pulled, "cancelled") == "gone"
    assert world.keys() - COUNTERS == {"slotline:held:w1"}


def test_a_worker_is_told_that_its_job_is_erased(world: World) -> None:
    pulled = world.take("w1")
    with world.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe("rq:pubsub:w1")
        channel.get_message(timeout=5)
        world.store.erase(pulled.record.id)
        message = channel.get_message(timeout=5)
    assert json.loads(message["data"])["command"] == "slotline-cancel"


def test_an_erased_dependent_is_not_started_when_its_parent_ends_and_leaves_nothing(world: World) -> None:
    parent = world.take()
    child = world.submit(depends_on=parent.record.id)
    world.store.erase(child)
    world.end(parent)
    world.record(parent, JobStatus.FINISHED)
    world.queue.enqueue_dependents(world.job(parent.record.id))
    assert world.waiting() == []
    world.store.erase(parent.record.id)
    assert world.keys() - COUNTERS == set()


def test_erasing_one_job_leaves_the_others_alone(world: World) -> None:
    stays = with_a_key(world)
    gone = failed(world) if world.pull(count=9) else ""
    before = world.client.hgetall(f"rq:job:{stays}")
    world.store.erase(gone)
    assert world.client.hgetall(f"rq:job:{stays}") == before
    assert not world.store.submit(JobRequest(prompt="a secret"), MODEL, idempotency="key").created
    assert [record.id for record in world.store.newest()] == [stays]


def test_a_key_that_means_another_job_by_now_is_kept_when_the_first_is_erased(world: World) -> None:
    first = with_a_key(world)
    (key,) = world.client.keys("slotline:idempotency:*")
    world.expire(key)
    second = with_a_key(world)
    world.store.erase(first)
    assert world.client.get(key).decode() == second


def test_an_erased_id_can_be_used_again(world: World) -> None:
    world.submit(id="a")
    world.store.erase("a")
    assert world.store.submit(JobRequest(prompt="other", id="a"), MODEL).created
    assert [p.record.id for p in world.pull()] == ["a"]


# --- dependents ---


def test_jobs_that_waited_for_a_cancelled_one_end_with_it_and_so_do_theirs(world: World) -> None:
    first = world.submit()
    second = world.submit(depends_on=first)
    third = world.submit(depends_on=second)
    theirs = world.queue.enqueue("slotline.generate", {"prompt": "x"}, depends_on=first)
    world.store.cancel(first)
    for job_id, cause in ((second, first), (third, second)):
        view = world.store.view(job_id)
        assert (view["status"], view["error"]["code"]) == ("cancelled", "dependency_failed")
        assert cause in view["error"]["message"]
        assert world.events(job_id) == ["done"]
    assert theirs.get_status() == "deferred"


@pytest.mark.parametrize("running", [False, True])
def test_jobs_that_waited_for_an_erased_one_end(running: bool, world: World) -> None:
    first = world.submit()
    if running:
        world.pull()
    second = world.submit(depends_on=first)
    world.store.erase(first)
    assert world.store.view(second)["status"] == "cancelled"
    assert world.events(second) == ["done"]


def test_readers_are_told_of_an_erase(world: World) -> None:
    job_id = world.submit()
    pubsub = world.client.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(f"slotline:events:{job_id}")
    pubsub.get_message(timeout=5)
    world.store.erase(job_id)
    names = []
    while not names or names[-1] != "removed":
        message = pubsub.get_message(timeout=5)
        assert message is not None, f"only {names} came"
        names.append(Event.from_message(message["data"]).name)
    pubsub.close()
    assert names == ["done", "removed"]


# --- word of the end ---


def test_whoever_asked_is_told_when_a_waiting_job_is_cancelled(world: World) -> None:
    job_id = world.store.submit(JobRequest(prompt="hello"), MODEL, notify="feed").job_id
    world.store.cancel(job_id)
    world.store.cancel(job_id)
    assert world.client.lrange("feed", 0, -1) == [job_id.encode()]


def test_the_cancel_of_a_running_job_is_told_when_it_ends(world: World) -> None:
    job_id = world.store.submit(JobRequest(prompt="hello"), MODEL, notify="feed").job_id
    (pulled,) = world.pull()
    world.store.cancel(job_id)
    assert not world.client.exists("feed")
    assert world.end(pulled, "cancelled") == "ok"
    assert world.client.lrange("feed", 0, -1) == [job_id.encode()]


def test_a_job_that_waits_again_is_cancelled_with_all_it_has_said(world: World) -> None:
    pulled = world.take()
    data = {"index": 0, "text": "Hi", "token": 7, "reasoning_content": "why"}
    at = str(EventId.of_token(0))
    world.store.stream.append([Append(pulled.record.id, pulled.execution, at, "token", dumps(data))])
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    view = world.store.cancel(pulled.record.id)
    assert (view["status"], view["text"], view["reasoning_content"]) == ("cancelled", "Hi", "why")


# --- many at once ---


def test_many_jobs_are_cancelled_whatever_their_state_and_the_rest_is_passed_over(world: World) -> None:
    ended, running = world.take(), world.take()
    world.end(ended)
    waiting = [make(world) for make in (queued, scheduled, deferred)]
    world.store.cancel_many([ended.record.id, "nobody", running.record.id, *waiting, waiting[0]])
    assert world.store.fetch(ended.record.id).status == "completed"
    assert world.store.fetch(running.record.id).cancelling
    assert [world.store.view(i)["status"] for i in waiting] == ["cancelled"] * 3
    assert [world.events(i) for i in waiting] == [["done"]] * 3


def test_jobs_that_waited_for_one_of_many_cancelled_ones_end_with_it(world: World) -> None:
    first = world.submit()
    second = world.submit(depends_on=first)
    third = world.submit(depends_on=second)
    world.store.cancel_many([world.submit(), first])
    errors = [world.store.view(i)["error"] for i in (second, third)]
    assert [e["code"] for e in errors] == ["dependency_failed"] * 2
    assert repr(first) in errors[0]["message"] and repr(second) in errors[1]["message"]


def test_many_waiting_jobs_are_cancelled_in_a_few_round_trips(world: World, sent: list[Any]) -> None:
    ids = [world.submit() for _ in range(50)]
    world.store.cancel_many([world.submit()])  # the script is there
    sent.clear()
    world.store.cancel_many(ids)
    assert len(sent) <= 6
    assert world.waiting() == []
