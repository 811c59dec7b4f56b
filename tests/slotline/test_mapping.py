from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slotline import Client, JobFailed
from slotline.errors import ApiError, SlotlineClientError
from slotline.results import Result
from tests.slotline.scripted import Handler, ScriptedServer, answer, error, job

Body = dict[str, Any]


@pytest.fixture
def replies(server: ScriptedServer) -> Callable[[Callable[[Body], Any]], None]:
    """Answer each submit by its body."""
    server._replies.clear()

    def use(make: Callable[[Body], Any]) -> None:
        def reply(handler: Handler) -> None:
            made = make(handler.body)
            (made if callable(made) else answer(made))(handler)

        server.on("POST", "/v1/jobs", reply)

    return use


def echo(body: Body) -> Body:
    return job(id=body["id"], text=str(body.get("prompt", body.get("messages"))))


def test_results_come_in_the_order_of_the_items(api: Client, replies: Any) -> None:
    second_is_there = threading.Event()

    def make(body: Body) -> Body:
        if body["prompt"] == "b":
            second_is_there.set()
        elif body["prompt"] == "a":
            assert second_is_there.wait(10)
        return echo(body)

    replies(make)
    assert [str(result) for result in api.map(["a", "b", "c"])] == ["a", "b", "c"]


def test_items_are_taken_only_as_there_is_room(api: Client, replies: Any) -> None:
    replies(echo)
    taken: list[int] = []

    def endless() -> Iterator[str]:
        number = 0
        while True:
            taken.append(number)
            yield f"p{number}"
            number += 1

    results = api.map(endless(), window=3)
    assert taken == []
    assert [str(next(results)) for _ in range(5)] == ["p0", "p1", "p2", "p3", "p4"]
    assert len(taken) == 7
    results.close()


def test_an_item_may_be_text_ids_a_conversation_or_fields(api: Client, server: ScriptedServer, replies: Any) -> None:
    replies(echo)
    talk = [{"role": "user", "content": "hi"}]
    own, other = {"prompt": "own", "max_tokens": 5}, {"messages": talk, "priority": "normal"}
    items: list[Any] = ["text", [1, 2], talk, own, other]
    assert len(list(api.map(items, max_tokens=9, window=1))) == 5
    sent = [{k: v for k, v in asked.body.items() if k != "id"} for asked in server.asked]
    assert sent == [
        {"priority": "batch", "max_tokens": 9, "prompt": "text"},
        {"priority": "batch", "max_tokens": 9, "prompt": [1, 2]},
        {"priority": "batch", "max_tokens": 9, "messages": talk},
        {"priority": "batch", "max_tokens": 5, "prompt": "own"},
        {"priority": "normal", "max_tokens": 9, "messages": talk},
    ]
    assert len({asked.body["id"] for asked in server.asked}) == 5


def bad_second(body: Body) -> Any:
    if body["prompt"] == "bad":
        return job("failed", error={"message": "no", "code": "timeout"})
    if body["prompt"] == "refused":
        return answer(error(400, "invalid_request", "no"), 400)
    return echo(body)


def test_the_first_error_is_raised_in_its_turn(api: Client, replies: Any) -> None:
    replies(bad_second)
    results = api.map(["a", "bad", "c"])
    assert str(next(results)) == "a"
    with pytest.raises(JobFailed):
        next(results)
    assert list(results) == []


def test_errors_can_be_given_in_the_place_of_results(api: Client, replies: Any) -> None:
    replies(bad_second)
    found = list(api.map(["a", "bad", "refused", "d"], return_errors=True))
    assert [type(result) for result in found] == [Result, JobFailed, ApiError, Result]
    assert isinstance(found[1], SlotlineClientError)


def test_closing_cancels_what_is_under_way(api: Client, server: ScriptedServer, replies: Any) -> None:
    waiting = threading.Semaphore(0)

    def make(body: Body) -> Any:
        if body["prompt"] == "first":
            return echo(body)

        def hang(handler: Handler) -> None:
            waiting.release()
            handler.reader_left()

        return hang

    replies(make)
    results = api.map(["first", "x", "y"])
    assert str(next(results)) == "first"
    assert waiting.acquire(timeout=30)
    assert waiting.acquire(timeout=30)
    results.close()
    ids = {asked.body["id"] for asked in server.asked_for("/v1/jobs") if asked.body["prompt"] != "first"}
    cancelled = {asked.path.split("/")[3] for asked in server.asked if asked.path.endswith("/cancel")}
    assert cancelled == ids


def test_an_item_that_is_no_prompt_ends_the_map(api: Client, replies: Any) -> None:
    replies(echo)
    with pytest.raises(TypeError, match="either a prompt or messages"):
        list(api.map([{"max_tokens": 3}]))


def test_nothing_gives_nothing_and_a_window_needs_room(api: Client) -> None:
    assert list(api.map([])) == []
    with pytest.raises(ValueError, match="window"):
        api.map([], window=0)


@pytest.mark.parametrize("items", ["one prompt", b"one prompt", {"prompt": "one"}])
def test_a_single_prompt_in_the_place_of_many_is_refused(api: Client, items: Any) -> None:
    with pytest.raises(TypeError, match="put it into a list"):
        api.map(items)


def test_an_item_that_is_no_prompt_is_refused_by_what_it_is() -> None:
    with Client("http://127.0.0.1:1") as api, pytest.raises(TypeError, match="not int"):
        list(api.map([5]))  # type: ignore[list-item]
