"""Looking at jobs: one, many, and the list."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rq.job import JobStatus
from rq.results import Result

from shared.errors import JobNotFound
from shared.names import events_key
from shared.reading import answer_so_far
from shared.results import JobObject
from tests.shared.world import World


def checked(shown: dict[str, Any]) -> dict[str, Any]:
    JobObject.model_validate_json(json.dumps(shown))
    return shown


def test_a_queued_job_shows_its_place_behind_all_more_urgent_ones(world: World) -> None:
    batch = [world.submit(priority="batch") for _ in range(2)]
    normal = [world.submit() for _ in range(2)]
    interactive = world.submit(priority="interactive")
    places = [checked(world.store.view(i))["position"] for i in (interactive, *normal, *batch)]
    assert places == [1, 2, 3, 4, 5]
    world.pull(count=2)
    assert [world.store.view(i)["position"] for i in (normal[1], *batch)] == [1, 2, 3]


def test_a_job_that_has_not_begun_has_no_text_and_a_running_one_its_text_so_far(world: World) -> None:
    job_id = world.submit()
    assert world.store.view(job_id)["text"] is None
    (pulled,) = world.pull()
    assert checked(world.store.view(job_id))["text"] == ""
    world.say(pulled, "Hel", "", "lo")
    shown = checked(world.store.view(job_id))
    assert (shown["status"], shown["text"], shown["position"], shown["attempts"]) == ("running", "Hello", None, 1)


def test_an_ended_job_shows_what_was_committed_before_and_after_rq_knows(world: World) -> None:
    pulled = world.take()
    world.end(pulled, tokens=2)
    committed = checked(world.store.view(pulled.record.id))
    assert (committed["status"], committed["text"]) == ("completed", "xx")
    world.record(pulled, JobStatus.FINISHED)
    assert world.store.view(pulled.record.id) == committed


def test_a_job_that_rq_ended_without_an_event_keeps_its_text(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a", "b")
    world.record(pulled, JobStatus.FAILED)
    shown = checked(world.store.view(pulled.record.id))
    assert (shown["status"], shown["text"]) == ("failed", "ab")
    assert shown["ended_at"] is not None


def test_a_completed_job_whose_log_has_expired_shows_its_result(world: World) -> None:
    pulled = world.take()
    world.end(pulled, tokens=2)
    world.record(pulled, JobStatus.FINISHED)
    shown = world.store.view(pulled.record.id)
    Result.create(world.job(pulled.record.id), Result.Type.SUCCESSFUL, ttl=100, return_value=shown)
    world.client.delete(events_key(pulled.record.id))
    assert shown["text"] == "xx" and world.store.view(pulled.record.id) == shown


def test_the_result_of_an_earlier_life_is_not_shown(world: World) -> None:
    pulled = world.take()
    world.end(pulled, tokens=2)
    world.record(pulled, JobStatus.FINISHED)
    shown = world.store.view(pulled.record.id)
    Result.create(world.job(pulled.record.id), Result.Type.SUCCESSFUL, ttl=100, return_value=shown)
    world.queue.enqueue_job(world.job(pulled.record.id))
    (again,) = world.pull()
    world.say(again, "new")
    world.job(again.record.id).set_status(JobStatus.FINISHED)
    assert world.store.view(again.record.id)["text"] == "new"


def test_many_are_fetched_in_the_order_asked_with_none_for_those_gone(world: World) -> None:
    ids = [world.submit() for _ in range(3)]
    world.client.delete(f"rq:job:{ids[1]}")
    found = world.store.fetch_many([ids[2], "nobody", ids[1], ids[0], ids[2]])
    assert [record and record.id for record in found] == [ids[2], None, None, ids[0], ids[2]]
    assert world.store.fetch_many([]) == []


# --- the list ---


def submit_many(world: World, n: int) -> list[str]:
    """Jobs whose times of creation are seconds apart, newest first."""
    ids = [world.submit() for _ in range(n)]
    for i, job_id in enumerate(ids):
        world.client.zadd("slotline:jobs", {job_id: i})
    return ids[::-1]


def listed(world: World, after: str | None = None) -> list[str]:
    return [record.id for record in world.store.newest(after)]


@pytest.mark.parametrize("n", [0, 1, 99, 100, 101, 250])
def test_all_jobs_are_listed_newest_first(n: int, world: World) -> None:
    ids = submit_many(world, n)
    assert listed(world) == ids


def test_a_new_job_is_the_newest(world: World) -> None:
    submit_many(world, 3)
    job_id = world.submit()
    assert listed(world)[0] == job_id


def test_expired_jobs_are_skipped_even_where_a_whole_page_has_expired(world: World) -> None:
    ids = submit_many(world, 320)
    for job_id in ids[10:230]:
        world.client.delete(f"rq:job:{job_id}")
    assert listed(world) == ids[:10] + ids[230:]


def test_the_list_goes_on_after_a_job_expired_or_not(world: World) -> None:
    ids = submit_many(world, 150)
    assert listed(world, ids[0]) == ids[1:]
    assert listed(world, ids[120]) == ids[121:]
    assert listed(world, ids[149]) == []
    world.client.delete(f"rq:job:{ids[5]}")
    assert listed(world, ids[5]) == ids[6:]


def test_a_list_cannot_go_on_after_a_job_that_never_was(world: World) -> None:
    submit_many(world, 2)
    with pytest.raises(JobNotFound):
        listed(world, "nobody")


def test_jobs_that_come_while_the_list_is_read_do_not_repeat_others(world: World) -> None:
    ids = submit_many(world, 250)
    reading = world.store.newest()
    seen = [next(reading).id for _ in range(100)]
    for _ in range(7):
        world.submit()
    assert seen + [record.id for record in reading] == ids


def test_a_list_goes_on_when_the_job_it_stands_at_is_erased(world: World) -> None:
    ids = submit_many(world, 150)
    reading = world.store.newest()
    seen = [next(reading).id for _ in range(100)]
    world.store.erase(ids[99])
    rest = [record.id for record in reading]
    assert rest == ids[100:]
    assert seen == ids[:100]


def test_the_answer_so_far_joins_what_its_events_add() -> None:
    def call(index: int, arguments: str, **head: str) -> dict[str, Any]:
        name = {"name": head.pop("name")} if "name" in head else {}
        return {"index": index, **head, "function": {**name, "arguments": arguments}}

    logprob = {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []}
    events = [
        {"index": 0, "text": "", "token": 1, "reasoning_content": "why "},
        {"index": 1, "text": "", "token": 2, "reasoning_content": "not"},
        {"index": 2, "text": "Hi", "token": 3, "logprobs": logprob},
        {"index": 3, "text": "", "token": 4, "tool_calls": [call(0, "{", id="a", name="f")]},
        {"index": 4, "text": "", "token": 5, "tool_calls": [call(0, "}"), call(1, "{}", id="b", name="g")]},
    ]
    assert answer_so_far(events) == {
        "text": "Hi",
        "reasoning_content": "why not",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
        "logprobs": [logprob],
    }


def test_an_answer_of_text_alone_claims_nothing_else() -> None:
    answer = answer_so_far([{"index": 0, "text": "Hi", "token": 3}])
    assert answer == {"text": "Hi", "reasoning_content": None, "tool_calls": None, "logprobs": None}
