"""The fence and the commit point: who may write to a job, and how it ends once."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError
from rq.job import JobStatus

from shared.names import JOB_FUNCTION
from shared.schemas import JobRequest
from shared.stream import Append, dumps
from tests.shared.world import MODEL, World, end_of, token


def lose(world: World) -> None:
    """The worker w1 is taken for dead and w2 takes over."""
    world.store.renew_lease("w1", 100)
    world.client.delete("slotline:lease:w1")
    world.store.reclaim("w2")
    world.pull("w2", count=9)


# --- append ---


def test_the_owner_may_append_and_the_order_is_kept(world: World) -> None:
    one, two = world.take(), world.take()
    events = [
        token(one.record.id, one.execution, 0, "a"),
        token(two.record.id, two.execution, 0, "x"),
        token(one.record.id, one.execution, 1, "b"),
        token(two.record.id, two.execution, 1, "y"),
        token(one.record.id, one.execution, 2, "c"),
    ]
    assert world.store.stream.append(events) == []
    assert [t["text"] for t in world.store.stream.tokens(one.record.id)] == ["a", "b", "c"]
    assert [t["text"] for t in world.store.stream.tokens(two.record.id)] == ["x", "y"]


def test_a_worker_that_lost_its_job_is_refused_by_name_and_the_others_are_written(world: World) -> None:
    lost = world.take("w1")
    lose(world)
    mine = world.take("w3")
    refused = world.store.stream.append(
        [
            token(lost.record.id, lost.execution, 0, "stale"),
            token(mine.record.id, mine.execution, 0, "a"),
            token(lost.record.id, lost.execution, 1, "stale"),
        ]
    )
    assert refused == [lost.execution]
    assert world.events(lost.record.id) == []
    assert world.events(mine.record.id) == ["token"]


@pytest.mark.parametrize("execution", ["", "someone-else"])
def test_nobody_but_the_owner_may_append(execution: str, world: World) -> None:
    waiting = world.submit()
    assert world.store.stream.append([token(waiting, execution, 0)]) == [execution]
    running = world.take("w2", priority="interactive").record.id
    assert world.store.stream.append([token(running, execution, 0)]) == [execution]
    assert world.store.stream.append([token("nobody", execution, 0)]) == [execution]
    assert not world.client.keys("slotline:events:*")


def test_an_append_that_is_repeated_is_success_and_changes_nothing(world: World) -> None:
    pulled = world.take()
    assert world.say(pulled, "a", "b") == []
    assert world.say(pulled, "a", "b", "c") == []
    assert [t["text"] for t in world.store.stream.tokens(pulled.record.id)] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["started", "resumed"])
def test_an_event_without_an_index_is_not_doubled_by_a_repeated_append(name: str, world: World) -> None:
    pulled = world.take()
    job, execution = pulled.record.id, pulled.execution
    note = Append(job, execution, "0-*", name, dumps({"tokens": 0}))
    for events in ([note], [note], [note, token(job, execution, 0)], [note, token(job, execution, 0)]):
        assert world.store.stream.append(events) == []
    assert world.events(job) == [name, "token"]


def test_a_job_starts_once_and_may_resume_again_and_again(world: World) -> None:
    pulled = world.take()
    names = ("started", "paused", "resumed", "paused", "resumed")
    notes = [Append(pulled.record.id, pulled.execution, "0-*", name, "{}") for name in names]
    world.store.stream.append(notes)
    assert world.events(pulled.record.id) == list(names)
    world.store.stream.append(notes[:1])
    assert world.events(pulled.record.id) == list(names)


def test_what_is_repeated_is_not_published_again(world: World) -> None:
    pulled = world.take()
    with world.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"slotline:events:{pulled.record.id}")
        world.say(pulled, "a")
        world.say(pulled, "a", "b")
        messages = []
        while len(messages) < 2:
            message = channel.get_message(timeout=5)
            messages += [message["data"]] if message else []
        world.client.publish(f"slotline:events:{pulled.record.id}", "end")
        end = None
        while end is None:
            end = channel.get_message(timeout=5)
    assert [b'"text":"a"' in messages[0], b'"text":"b"' in messages[1], end["data"]] == [True, True, b"end"]


def test_a_token_that_redis_would_not_take_is_an_error_and_not_taken_for_repeated(world: World) -> None:
    pulled = world.take()
    world.client.set(f"slotline:events:{pulled.record.id}", "not a log")
    with pytest.raises(ResponseError):
        world.say(pulled, "a")


def test_a_token_is_not_lost_in_silence_when_redis_is_full(world: World) -> None:
    pulled = world.take()
    world.client.config_set("maxmemory", "1")
    try:
        with pytest.raises(ResponseError):
            world.say(pulled, "a")
    finally:
        world.client.config_set("maxmemory", "0")
    assert world.say(pulled, "a") == []
    assert len(world.store.stream.tokens(pulled.record.id)) == 1


# --- commit ---


@pytest.mark.parametrize(("status", "event"), [("completed", "done"), ("failed", "failed"), ("cancelled", "done")])
def test_a_commit_ends_the_log_and_the_job_at_once(status: str, event: str, world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a", "b")
    assert world.end(pulled, status, tokens=2, ttl_s=77) == "ok"
    assert world.events(pulled.record.id) == ["token", "token", event]
    shown = world.store.view(pulled.record.id)
    assert (shown["status"], shown["text"]) == (status, "xx")
    last = world.store.stream.last(pulled.record.id)
    assert last is not None
    assert last.is_terminal
    assert last.json() == shown
    assert (last.id.tokens, last.index) == (2, None)
    assert 0 < world.client.ttl(f"slotline:events:{pulled.record.id}") <= 77


def test_a_commit_without_any_token_is_an_event_without_an_index(world: World) -> None:
    pulled = world.take()
    assert world.end(pulled) == "ok"
    (event,) = world.store.stream.replay(pulled.record.id)
    assert (str(event.id), event.index) == ("0-1", None)


def test_a_second_commit_is_told_that_it_has_ended_and_changes_nothing(world: World) -> None:
    pulled = world.take()
    assert world.end(pulled, "completed") == "ok"
    assert world.end(pulled, "failed") == "ended"
    assert world.end(pulled, "cancelled") == "ended"
    assert world.events(pulled.record.id) == ["done"]
    assert world.store.view(pulled.record.id)["status"] == "completed"


def test_a_commit_of_a_deleted_job_is_gone_and_leaves_no_log(world: World) -> None:
    pulled = world.take()
    world.job(pulled.record.id).delete()
    assert world.end(pulled) == "gone"
    assert not world.client.exists(f"slotline:events:{pulled.record.id}", f"rq:job:{pulled.record.id}")


def test_a_commit_of_a_worker_that_lost_its_job_is_refused(world: World) -> None:
    pulled = world.take("w1")
    lose(world)
    assert world.end(pulled) == "lost"
    assert world.end(pulled, "cancelled") == "lost"
    assert world.events(pulled.record.id) == []
    assert world.store.view(pulled.record.id)["status"] == "running"


def test_a_commit_of_a_job_that_was_handed_back_is_refused(world: World) -> None:
    pulled = world.take()
    world.store.hand_back("w1", [(pulled.record.id, pulled.execution)])
    assert world.end(pulled) == "lost"


def test_a_cancelled_job_can_only_be_committed_as_cancelled(world: World) -> None:
    pulled = world.take()
    world.store.cancel(pulled.record.id)
    assert world.end(pulled, "completed") == "cancelled"
    assert world.end(pulled, "failed") == "cancelled"
    assert world.events(pulled.record.id) == []
    assert world.end(pulled, "cancelled") == "ok"


@pytest.mark.parametrize("status", [JobStatus.CANCELED, JobStatus.STOPPED])
def test_a_job_that_rq_cancelled_or_stopped_can_only_be_committed_as_cancelled(status: JobStatus, world: World) -> None:
    pulled = world.take()
    if status == JobStatus.CANCELED:
        world.job(pulled.record.id).cancel()
    else:
        world.job(pulled.record.id).set_status(status)
    assert world.end(pulled, "completed") == "cancelled"
    assert world.end(pulled, "cancelled") == "ok"
    assert world.events(pulled.record.id) == ["done"]


def test_many_ends_are_committed_in_one_call_each_with_its_own_outcome(world: World) -> None:
    fine, cancelled, deleted, over = (world.take() for _ in range(4))
    stolen = end_of(world.take())
    world.store.cancel(cancelled.record.id)
    world.job(deleted.record.id).delete()
    world.end(over)
    world.client.hset(f"rq:job:{stolen.job_id}", "sl_exec", "other")
    outcomes = world.store.commit([end_of(cancelled), end_of(fine), stolen, end_of(over), end_of(deleted)])
    assert outcomes == ["cancelled", "ok", "lost", "ended", "gone"]
    assert world.store.view(fine.record.id)["status"] == "completed"


def test_committing_nothing_is_nothing(world: World) -> None:
    assert world.store.commit([]) == []


def test_an_end_after_fewer_tokens_than_the_log_has_is_last_and_harms_no_other(world: World) -> None:
    """A job that was taken up again after some tokens, and then refused before it generated any."""
    before, resumed, after = world.take(), world.take(), world.take()
    world.say(resumed, "a", "b", "c")
    outcomes = world.store.commit([end_of(before), end_of(resumed, "failed", tokens=0), end_of(after)])
    assert outcomes == ["ok", "ok", "ok"]
    assert world.events(resumed.record.id) == ["token", "token", "token", "failed"]


def test_an_end_goes_behind_events_without_an_index(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a")
    note = token(pulled.record.id, pulled.execution, 0)
    world.store.stream.append([type(note)(note.job_id, note.execution, "1-*", "resumed", "{}")])
    assert world.end(pulled, tokens=1) == "ok"
    assert world.events(pulled.record.id) == ["token", "resumed", "done"]


def test_the_end_is_published_with_the_very_data_of_the_log(world: World) -> None:
    pulled = world.take()
    with world.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"slotline:events:{pulled.record.id}")
        channel.get_message(timeout=5)
        world.end(pulled)
        message = None
        while message is None:
            message = channel.get_message(timeout=5)
    last = world.store.stream.last(pulled.record.id)
    assert last is not None
    assert message["data"].decode() == '{"event":"done","id":"0-1","data":' + last.data + "}"


def test_a_job_of_plain_rq_ends_the_same_way(world: World) -> None:
    job = world.queue.enqueue(JOB_FUNCTION, {"prompt": "hi"})
    (pulled,) = world.pull()
    assert world.end(pulled) == "ok"
    assert world.events(job.id) == ["done"]


# --- word of the end ---


def submit_with(world: World, **options: str) -> str:
    return world.store.submit(JobRequest(prompt="hello"), MODEL, **options).job_id  # type: ignore[arg-type]


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_whoever_asked_is_told_of_an_end_once(status: str, world: World) -> None:
    job_id = submit_with(world, notify="feed")
    (pulled,) = world.pull()
    assert world.end(pulled, status) == "ok"
    assert world.end(pulled, status) == "ended"
    assert world.client.lrange("feed", 0, -1) == [job_id.encode()]


def test_nobody_is_told_of_an_end_that_is_not_committed(world: World) -> None:
    submit_with(world, notify="feed")
    (pulled,) = world.pull()
    lose(world)
    assert world.end(pulled) == "lost"
    assert not world.client.exists("feed")


def test_a_job_without_a_feed_tells_nobody(world: World) -> None:
    before = world.keys()
    pulled = world.take()
    world.end(pulled)
    assert {key for key in world.keys() - before if "feed" in key} == set()
    assert world.client.hget(f"rq:job:{pulled.record.id}", "sl_notify") is None


def test_parent_and_web_process_stay_with_a_job(world: World) -> None:
    job_id = submit_with(world, parent="call-1", bound="web-7")
    record = world.store.fetch(job_id)
    assert (record.parent, record.bound) == ("call-1", "web-7")
    (pulled,) = world.pull()
    assert (pulled.record.parent, pulled.record.bound) == ("call-1", "web-7")
    assert world.store.view(job_id)["parent"] == "call-1"
    alone = world.store.fetch(world.submit())
    assert (alone.parent, alone.bound) == (None, None)
