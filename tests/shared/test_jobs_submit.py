"""Submitting: one job per id and key, the queue limit, and where a job waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any, TypeVar

import pytest
from rq.job import JobStatus
from rq.registry import DeferredJobRegistry, ScheduledJobRegistry
from rq.scheduler import RQScheduler

from shared.errors import IdConflict, InvalidRequest, QueueFull, SlotlineError
from shared.jobs import request_of
from shared.names import JOB_FUNCTION, SERIALIZER, queue_name
from shared.registry import ModelCard, Registry
from shared.schemas import JobRequest
from shared.stream import EventId
from shared.submission import Submitted
from shared.work import Reclaimed
from tests.shared.world import MODEL, NORMAL, QUEUES, World

T = TypeVar("T")


def body(**fields: Any) -> JobRequest:
    return JobRequest(**{"prompt": "hello", **fields})


def at_once(n: int, call: Callable[[int], T]) -> list[T | SlotlineError]:
    """Call from n threads that start together; an error of ours counts as an answer."""
    barrier = Barrier(n)

    def one(i: int) -> T | SlotlineError:
        barrier.wait(timeout=10)
        try:
            return call(i)
        except SlotlineError as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


# --- what is stored ---


def test_a_new_job_waits_on_the_queue_of_its_model_and_priority(world: World) -> None:
    submitted = world.store.submit(body(priority="batch", metadata={"a": 1}, retries=2, result_ttl_s=9), MODEL)
    job = world.job(submitted.job_id)
    assert submitted.created
    assert world.waiting(queue_name(MODEL, "batch")) == [job.id]
    assert (job.func_name, job.args, job.kwargs) == (JOB_FUNCTION, [{"prompt": "hello"}], {})
    assert (job.get_status(), job.origin) == (JobStatus.QUEUED, queue_name(MODEL, "batch"))
    assert (job.meta, job.retries_left, job.result_ttl, job.failure_ttl) == ({"a": 1}, 2, 9, 9)
    assert world.client.ttl(job.key) == -1


def test_rq_sees_the_queue_and_the_worker_finds_it(world: World) -> None:
    world.submit(priority="batch")
    name = queue_name(MODEL, "batch")
    assert world.client.sismember("rq:queues", f"rq:queue:{name}")
    assert world.client.smembers(f"slotline:queues:{MODEL}") == {name.encode()}
    assert world.client.keys("slotline:doorbell:*") == [f"slotline:doorbell:{MODEL}:batch".encode()]


def test_the_times_kept_are_the_documented_ones_where_the_request_says_nothing(world: World) -> None:
    job = world.job(world.submit())
    assert (job.result_ttl, job.failure_ttl, job.timeout) == (86_400, 604_800, 600)


def test_the_prompt_is_not_in_the_description_that_rq_logs(world: World) -> None:
    job_id = world.submit(prompt="a secret")
    assert "secret" not in (world.job(job_id).description or "")


@pytest.mark.parametrize("prompt", ["a\0b", "😀\r\n\u2028", "\\ud800", [1, 2]])
def test_a_prompt_arrives_as_it_was_given(prompt: Any, world: World) -> None:
    assert request_of(world.take(prompt=prompt).record) == {"prompt": prompt}


def test_the_doorbell_does_not_grow_without_end(world: World) -> None:
    for _ in range(5):
        world.submit()
    assert world.client.llen(f"slotline:doorbell:{MODEL}:normal") == 1


# --- ids ---


def test_the_same_id_with_the_same_body_is_the_same_job(world: World) -> None:
    assert world.store.submit(body(id="a"), MODEL) == Submitted("a", created=True)
    assert world.store.submit(body(id="a"), MODEL) == Submitted("a", created=False)
    assert world.waiting() == ["a"]


def test_the_same_id_with_another_body_is_a_conflict_and_changes_nothing(world: World) -> None:
    world.submit(id="a")
    before = world.client.hgetall("rq:job:a")
    with pytest.raises(IdConflict, match="'a'") as caught:
        world.submit(id="a", prompt="other")
    assert caught.value.param == "id"
    assert world.client.hgetall("rq:job:a") == before
    assert world.waiting() == ["a"]


def test_the_same_job_is_found_again_once_it_runs_and_once_it_has_ended(world: World) -> None:
    pulled = world.take(id="a")
    assert not world.store.submit(body(id="a"), MODEL).created
    world.end(pulled)
    world.record(pulled, JobStatus.FINISHED)
    assert not world.store.submit(body(id="a"), MODEL).created
    assert world.pull() == []


def test_an_id_of_a_job_that_rq_made_is_a_conflict(world: World) -> None:
    world.queue.enqueue(JOB_FUNCTION, {"prompt": "hello"}, job_id="a")
    with pytest.raises(IdConflict):
        world.submit(id="a")


def test_an_id_is_free_again_once_its_job_has_expired(world: World) -> None:
    world.submit(id="a")
    world.store.cancel("a")
    world.expire("rq:job:a")
    assert world.store.submit(body(id="a", prompt="other"), MODEL).created
    assert [p.record.id for p in world.pull()] == ["a"]


@pytest.mark.parametrize("key", [None, "key"], ids=["by id", "by key"])
def test_eight_callers_at_once_with_one_body_make_one_job(key: str | None, world: World) -> None:
    given = {} if key else {"id": "a"}
    answers = at_once(8, lambda _: world.store.submit(body(**given), MODEL, idempotency=key))
    submitted = [a for a in answers if isinstance(a, Submitted)]
    assert len(submitted) == 8
    assert sum(s.created for s in submitted) == 1
    assert len({s.job_id for s in submitted}) == 1
    assert world.waiting() == [submitted[0].job_id]


@pytest.mark.parametrize("key", [None, "key"], ids=["by id", "by key"])
def test_of_eight_callers_at_once_with_different_bodies_one_wins(key: str | None, world: World) -> None:
    given = {} if key else {"id": "a"}
    answers = at_once(8, lambda i: world.store.submit(body(prompt=f"p{i}", **given), MODEL, idempotency=key))
    (won,) = [i for i, a in enumerate(answers) if isinstance(a, Submitted)]
    assert sum(isinstance(a, IdConflict) for a in answers) == 7
    assert [request_of(p.record)["prompt"] for p in world.pull(count=9)] == [f"p{won}"]


# --- idempotency keys ---


def test_the_same_key_gives_the_first_job_whatever_the_id(world: World) -> None:
    first = world.store.submit(body(), MODEL, idempotency="key")
    assert world.store.submit(body(), MODEL, idempotency="key") == Submitted(first.job_id, created=False)
    assert world.store.submit(body(id="b"), MODEL, idempotency="key") == Submitted(first.job_id, created=False)
    assert world.store.submit(body(), MODEL, idempotency="other").created
    assert world.store.submit(body(), MODEL).created


def test_the_same_key_with_another_body_is_a_conflict(world: World) -> None:
    world.store.submit(body(), MODEL, idempotency="key")
    with pytest.raises(IdConflict):
        world.store.submit(body(prompt="other"), MODEL, idempotency="key")
    assert len(world.waiting()) == 1


def test_a_key_lasts_as_long_as_it_was_told(world: World) -> None:
    world.store.submit(body(), MODEL, idempotency="key", idempotency_ttl_s=50)
    (key,) = world.client.keys("slotline:idempotency:*")
    assert 0 < world.client.ttl(key) <= 50
    world.expire(key)
    assert world.store.submit(body(prompt="other"), MODEL, idempotency="key").created


def test_a_key_is_not_readable_in_redis(world: World) -> None:
    world.store.submit(body(), MODEL, idempotency="a secret")
    assert not [key for key in world.keys() if "secret" in key]  # noqa: SIM118


def test_a_key_whose_job_is_gone_does_not_let_an_id_be_overwritten(world: World) -> None:
    first = world.store.submit(body(), MODEL, idempotency="key")
    world.client.delete(f"rq:job:{first.job_id}")
    world.submit(id="b", prompt="mine")
    with pytest.raises(IdConflict, match="'b'"):
        world.store.submit(body(id="b", prompt="other"), MODEL, idempotency="key")
    assert request_of(world.store.fetch("b")) == {"prompt": "mine"}


# --- the queue limit ---


def limit(world: World, max_queue: int) -> None:
    Registry(world.client).register_model(ModelCard(MODEL, "", 64, 100, 64, False, max_queue, ""))


def test_the_queue_limit_counts_all_priorities_and_holds_at_once_from_twenty_callers(world: World) -> None:
    limit(world, 5)
    priorities = ("interactive", "normal", "batch")
    answers = at_once(20, lambda i: world.store.submit(body(priority=priorities[i % 3]), MODEL))
    assert sum(isinstance(a, Submitted) for a in answers) == 5
    assert sum(isinstance(a, QueueFull) for a in answers) == 15
    assert sum(len(world.waiting(queue)) for queue in QUEUES) == 5
    assert len(world.client.keys("rq:job:*")) == 5


def test_a_full_queue_says_so_and_keeps_nothing(world: World) -> None:
    limit(world, 1)
    world.submit()
    before = world.keys()
    with pytest.raises(QueueFull, match="1 jobs are waiting"):
        world.store.submit(body(id="a"), MODEL, idempotency="key")
    assert world.keys() == before


def test_a_full_queue_still_answers_for_a_job_it_has(world: World) -> None:
    limit(world, 1)
    world.submit(id="a")
    assert not world.store.submit(body(id="a"), MODEL).created


def test_running_jobs_and_those_for_later_do_not_count_as_waiting(world: World) -> None:
    limit(world, 1)
    world.take()
    world.submit(delay_s=1000)
    world.submit()
    with pytest.raises(QueueFull):
        world.submit()
    world.submit(delay_s=1000)


def test_other_models_jobs_do_not_count(world: World) -> None:
    limit(world, 1)
    world.submit()
    assert world.store.submit(body(), "other").created


# --- later ---


def scheduled_for(world: World, job_id: str) -> float:
    return float(world.client.zscore(ScheduledJobRegistry(NORMAL, world.client).key, job_id))


def run_scheduler(world: World) -> None:
    """One pass of RQ's own scheduler."""
    scheduler = RQScheduler([NORMAL], connection=world.client, serializer=SERIALIZER)
    scheduler.acquire_locks()
    scheduler.enqueue_scheduled_jobs()
    scheduler.release_locks()


def test_a_job_for_later_is_not_pulled_before_its_time(world: World) -> None:
    job_id = world.submit(delay_s=1000)
    run_scheduler(world)
    assert world.pull() == []
    assert world.store.view(job_id)["detail"] == "scheduled"


def test_a_job_whose_time_has_come_is_queued_by_rqs_scheduler(world: World) -> None:
    job_id = world.submit(run_at=datetime.now(UTC) - timedelta(seconds=2))
    run_scheduler(world)
    assert [p.record.id for p in world.pull()] == [job_id]


def test_a_time_long_ago_means_now(world: World) -> None:
    job_id = world.submit(run_at=datetime(1960, 1, 1, tzinfo=UTC))
    run_scheduler(world)
    assert [p.record.id for p in world.pull()] == [job_id]


@pytest.mark.parametrize("second", [0.0, 0.001, 0.5, 0.999])
def test_a_job_is_never_due_before_the_moment_it_was_given(second: float, world: World) -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=second)
    due = scheduled_for(world, world.submit(run_at=moment))
    assert moment.timestamp() <= due < moment.timestamp() + 1
    before = time.time()
    due = scheduled_for(world, world.submit(delay_s=10 + second))
    assert before + 10 + second <= due < time.time() + 11 + second


def test_the_time_zone_of_run_at_counts(world: World) -> None:
    moment = datetime.fromisoformat("2030-01-01T02:00:00+02:00")
    assert scheduled_for(world, world.submit(run_at=moment)) == datetime(2030, 1, 1, tzinfo=UTC).timestamp()


# --- dependencies ---


def finish(world: World, job_id: str) -> None:
    """A worker takes a job and it ends well, RQ's dependents included."""
    (pulled,) = (p for p in world.pull(count=9) if p.record.id == job_id)
    world.end(pulled)
    world.record(pulled, JobStatus.FINISHED)
    world.queue.enqueue_dependents(world.job(job_id))


def test_a_dependent_waits_until_all_it_depends_on_have_completed(world: World) -> None:
    one, two = world.submit(), world.submit(id="two")
    child = world.submit(depends_on=[one, two, one])
    assert world.store.view(child)["detail"] == "deferred"
    assert child in DeferredJobRegistry(NORMAL, world.client)
    assert sorted(world.job(child).dependency_ids) == sorted([one, two])
    pulled = world.pull(count=9)
    assert [p.record.id for p in pulled] == [one, two]
    for p in pulled:
        assert child not in world.waiting()
        world.end(p)
        world.record(p, JobStatus.FINISHED)
        world.queue.enqueue_dependents(world.job(p.record.id))
    assert [p.record.id for p in world.pull()] == [child]
    assert child not in DeferredJobRegistry(NORMAL, world.client)


def test_a_dependent_of_a_finished_job_is_queued_at_once(world: World) -> None:
    parent = world.submit()
    finish(world, parent)
    child = world.submit(depends_on=parent)
    assert world.waiting() == [child]


def test_a_dependency_that_does_not_exist_is_named_and_nothing_is_kept(world: World) -> None:
    parent = world.submit()
    before = world.keys()
    with pytest.raises(InvalidRequest, match="'nobody'") as caught:
        world.submit(depends_on=[parent, "nobody"])
    assert caught.value.param == "depends_on"
    assert world.keys() == before


def test_a_job_cannot_depend_on_itself(world: World) -> None:
    with pytest.raises(InvalidRequest, match="'a'"):
        world.submit(id="a", depends_on="a")


def failed(world: World) -> str:
    pulled = world.take()
    world.end(pulled, "failed")
    world.record(pulled, JobStatus.FAILED)
    return pulled.record.id


def failed_but_not_recorded(world: World) -> str:
    pulled = world.take()
    world.end(pulled, "failed")
    return pulled.record.id


def stopped(world: World) -> str:
    pulled = world.take()
    world.record(pulled, JobStatus.STOPPED)
    return pulled.record.id


def cancelled(world: World) -> str:
    job_id = world.submit()
    world.store.cancel(job_id)
    return job_id


def being_cancelled(world: World) -> str:
    job_id = world.take().record.id
    world.store.cancel(job_id)
    return job_id


@pytest.mark.parametrize("doom", [failed, failed_but_not_recorded, stopped, cancelled, being_cancelled])
def test_a_dependency_that_can_no_longer_complete_is_refused(doom: Callable[[World], str], world: World) -> None:
    parent = doom(world)
    with pytest.raises(InvalidRequest, match="can no longer complete") as caught:
        world.submit(depends_on=parent)
    assert caught.value.param == "depends_on"
    assert world.waiting() == []


def test_a_dependency_that_is_completing_is_waited_for(world: World) -> None:
    pulled = world.take()
    world.end(pulled, "completed")
    child = world.submit(depends_on=pulled.record.id)
    assert world.store.view(child)["detail"] == "deferred"
    world.record(pulled, JobStatus.FINISHED)
    world.queue.enqueue_dependents(world.job(pulled.record.id))
    assert world.waiting() == [child]


# --- forgotten scripts ---


def test_redis_forgetting_the_scripts_changes_nothing(world: World) -> None:
    store = world.store

    def forget() -> None:
        world.client.script_flush()

    forget()
    job_id = world.submit()
    forget()
    (pulled,) = world.pull()
    forget()
    assert world.say(pulled, "a") == []
    forget()
    store.hand_back("w1", [(job_id, pulled.execution)])
    forget()
    (pulled,) = world.pull("w2")
    forget()
    world.client.set("slotline:lease:w2", "1")
    world.client.sadd("slotline:workers", "dead")
    assert store.reclaim("w1") == Reclaimed()
    forget()
    store.cancel(job_id)
    forget()
    assert world.end(pulled) == "cancelled"
    forget()
    assert world.end(pulled, "cancelled") == "ok"
    world.record(pulled, JobStatus.STOPPED)
    forget()
    assert store.retry(job_id)["status"] == "queued"
    forget()
    (pulled,) = world.pull("w2")
    assert store.stream.last(job_id) is None
    forget()
    world.say(pulled, "a")
    last = store.stream.last(job_id)
    assert last is not None
    assert last.id == EventId.of_token(0)


# --- many at once ---


def test_many_jobs_are_queued_in_order_as_children_of_one_call(world: World) -> None:
    requests = [JobRequest(prompt=str(n), id=f"call-{n}") for n in range(5)]
    answers = world.store.submit_many(requests, MODEL, parent="call", bound="web")
    assert answers == [Submitted(f"call-{n}", created=True) for n in range(5)]
    assert world.waiting() == [f"call-{n}" for n in range(5)]
    assert {(r.parent, r.bound) for r in world.store.fetch_many(world.waiting()) if r} == {("call", "web")}


def test_many_jobs_are_stored_as_one_alone_is(world: World) -> None:
    alone = world.store.submit(JobRequest(prompt="a", id="alone"), MODEL).job_id
    world.store.submit_many([JobRequest(prompt="a", id="among")], MODEL)
    own = {b"created_at", b"enqueued_at", b"sl_ticket"}
    stored = [{k: v for k, v in world.client.hgetall(f"rq:job:{i}").items() if k not in own} for i in (alone, "among")]
    assert stored[0] == stored[1]


def test_of_many_jobs_those_that_fit_are_queued_and_the_refusal_is_raised(world: World) -> None:
    world.client.hset("slotline:model:m", "max_queue", 2)
    with pytest.raises(QueueFull, match="2 jobs"):
        world.store.submit_many([JobRequest(prompt="a", id=f"j{n}") for n in range(4)], MODEL)
    assert world.waiting() == ["j0", "j1"]


def test_no_jobs_at_all_are_no_error(world: World) -> None:
    assert world.store.submit_many([], MODEL) == []


def test_many_jobs_are_queued_in_a_round_trip_or_two(world: World, sent: list[Any]) -> None:
    world.submit()  # the script is there
    sent.clear()
    world.store.submit_many([JobRequest(prompt="a") for _ in range(50)], MODEL)
    assert len(sent) <= 2
    assert len(world.waiting()) == 51
