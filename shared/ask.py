"""Questions to a live worker: check a request, tokenise, detokenise.

The asker pushes a question to the model's list and waits on a list of its own; the worker's answer expires
there. A question carries its deadline, and a worker drops it once that has passed.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

import redis

from shared.errors import NoWorker, from_dict
from shared.names import answer_key, ask_key

Kind = Literal["check", "tokenize", "detokenize"]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `deadline` is in seconds since 1970; Redis' clock is not needed at this precision."""

    id: str
    kind: Kind
    body: dict[str, Any]
    deadline: float


def ask(client: redis.Redis, model: str, kind: Kind, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask any live worker of `model` and return its answer.

    Raises:
        NoWorker: none answered in time.
        SlotlineError: the worker's own refusal, with its code.
    """
    question = Question(uuid.uuid4().hex, kind, body, time.time() + timeout_s)
    text = json.dumps({"id": question.id, "kind": kind, "body": body, "deadline": question.deadline})
    pipe = client.pipeline()
    pipe.rpush(ask_key(model), text)
    pipe.expire(ask_key(model), max(1, int(timeout_s) + 1))
    pipe.execute()
    reply = client.blpop([answer_key(question.id)], timeout=timeout_s)
    if reply is None:
        client.lrem(ask_key(model), 0, text)
        raise NoWorker(f"no worker of model {model!r} answered within {timeout_s:g} s")
    answer: dict[str, Any] = json.loads(reply[1])
    if "error" in answer:
        raise from_dict(answer["error"])
    return answer


def next_question(client: redis.Redis, model: str, wait_s: float) -> Question | None:
    """Wait for a question to the model; None if there was none in time or its asker has given up."""
    reply = client.blpop([ask_key(model)], timeout=wait_s)
    if reply is None:
        return None
    question = Question(**json.loads(reply[1]))
    return question if time.time() < question.deadline else None


def answer(client: redis.Redis, question: Question, body: dict[str, Any]) -> None:
    """Send the answer, or `{"error": …}`."""
    pipe = client.pipeline()
    pipe.rpush(answer_key(question.id), json.dumps(body))
    pipe.expire(answer_key(question.id), 30)
    pipe.execute()
