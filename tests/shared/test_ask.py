from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from shared.ask import answer, ask, next_question
from shared.errors import ContextLengthExceeded, InvalidGrammar, NoWorker, SlotlineError
from tests.shared.world import until

MODEL = "m"
LIST = f"slotline:ask:{MODEL}"


def serve(client: redis.Redis, reply: dict[str, Any] | None = None) -> dict[str, Any]:
    """Answer one question, with the question itself where no reply is given; what was asked."""
    question = next_question(client, MODEL, wait_s=4)
    assert question is not None
    asked = {"kind": question.kind, "body": question.body}
    answer(client, question, asked if reply is None else reply)
    return asked


def test_a_question_comes_to_a_worker_and_its_answer_back(client: redis.Redis) -> None:
    body = {"text": "é\r\n\u2028", "ids": [1, 2], "deep": {"a": None}}
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, client)
        got = ask(client, MODEL, "tokenize", body, timeout_s=4)
        assert got == serving.result() == {"kind": "tokenize", "body": body}


def test_each_asker_gets_its_own_answer(client: redis.Redis) -> None:
    with ThreadPoolExecutor(12) as pool:
        serving = [pool.submit(serve, client) for _ in range(4)]
        asking = [pool.submit(ask, client, MODEL, "check", {"n": n}, 4) for n in range(4)]
        assert [a.result()["body"] for a in asking] == [{"n": n} for n in range(4)]
        assert sorted(s.result()["body"]["n"] for s in serving) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "error", [InvalidGrammar("no root", "grammar"), ContextLengthExceeded("9 of 8 tokens", "prompt")]
)
def test_a_workers_refusal_is_raised_at_the_askers_with_its_code(error: SlotlineError, client: redis.Redis) -> None:
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, client, {"error": error.to_dict()})
        with pytest.raises(type(error)) as caught:
            ask(client, MODEL, "check", {}, timeout_s=4)
        serving.result()
    assert caught.value.to_dict() == error.to_dict()


def test_without_a_worker_the_asker_is_told_in_time_and_the_question_withdrawn(client: redis.Redis) -> None:
    began = time.monotonic()
    with pytest.raises(NoWorker, match=r"model 'm' answered within 0\.1 s"):
        ask(client, MODEL, "check", {}, timeout_s=0.1)
    assert time.monotonic() - began < 2
    assert client.keys("*") == []


def test_a_worker_of_another_model_does_not_answer(client: redis.Redis) -> None:
    with pytest.raises(NoWorker):
        ask(client, "other", "check", {}, timeout_s=0.1)
    assert next_question(client, MODEL, wait_s=0.05) is None


def test_a_question_whose_asker_has_given_up_is_dropped(client: redis.Redis) -> None:
    late = {"id": "q1", "kind": "check", "body": {}, "deadline": time.time() - 0.01}
    alive = {"id": "q2", "kind": "check", "body": {}, "deadline": time.time() + 60}
    client.rpush(LIST, json.dumps(late), json.dumps(alive))
    assert next_question(client, MODEL, wait_s=1) is None
    question = next_question(client, MODEL, wait_s=1)
    assert question is not None
    assert question.id == "q2"


def test_questions_are_answered_in_the_order_they_were_asked(client: redis.Redis) -> None:
    for n in range(3):
        question = {"id": f"q{n}", "kind": "check", "body": {}, "deadline": time.time() + 60}
        client.rpush(LIST, json.dumps(question))
    found = [next_question(client, MODEL, wait_s=1) for _ in range(3)]
    assert [q and q.id for q in found] == ["q0", "q1", "q2"]


def test_no_question_in_time_is_none(client: redis.Redis) -> None:
    assert next_question(client, MODEL, wait_s=0.05) is None


def test_an_answer_nobody_fetches_does_not_stay(client: redis.Redis) -> None:
    client.rpush(LIST, json.dumps({"id": "q1", "kind": "check", "body": {}, "deadline": time.time() + 60}))
    question = next_question(client, MODEL, wait_s=1)
    assert question is not None
    answer(client, question, {})
    assert 0 < client.ttl("slotline:answer:q1") <= 30


def test_a_question_does_not_stay_when_its_asker_dies(client: redis.Redis) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, client, MODEL, "check", {}, 1.5)
        until(lambda: client.exists(LIST))
        assert 0 < client.ttl(LIST) <= 3
        serve(client, {"ok": True})
        assert asking.result() == {"ok": True}
