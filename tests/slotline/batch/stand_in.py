"""A runner without a model: it answers as the test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from slotline.batch.lines import JOBS, Line
from slotline.batch.rows import Outcome
from slotline.batch.runner import RunnerLost

Answer = Callable[[Line], Outcome]


def served(line: Line) -> Outcome:
    """Say the prompt again."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 0}
    text = str(line.body.get("prompt") or line.body.get("messages"))
    if line.endpoint == JOBS:
        job = {"status": "completed", "text": text, "finish_reason": "stop", "usage": usage}
        return Outcome(line, job)
    return Outcome(line, {"id": "chatcmpl-1", "choices": [{"finish_reason": "stop"}], "usage": usage})


def refused(line: Line) -> Outcome:
    error = {"message": "`prompt` is too long", "type": "invalid_request_error", "code": "too_long", "param": "prompt"}
    return Outcome(line, None, error, 400)


class StandIn:
    """A `Runner`. Lines end in the order `pick` chooses: the place in the queue of what is under way.

    Attributes:
        started: every line that was given out.
        most: most lines that were under way at a time.
    """

    model = "stand-in"
    where = "nothing"
    trouble: str | None = None

    def __init__(
        self, answer: Answer = served, slots: int = 4, lost_after: int | None = None, pick: int = 0, at_once: int = 1
    ) -> None:
        self.slots = slots
        self.started: list[Line] = []
        self.most = 0
        self.closed = 0
        self._answer = answer
        self._lost_after = lost_after
        self._pick = pick
        self._at_once = at_once
        self._ended = 0
        self._queue: deque[Line] = deque()

    def start(self, line: Line) -> None:
        self.started.append(line)
        self._queue.append(line)
        self.most = max(self.most, len(self._queue))

    def ended(self, wait_s: float) -> list[Outcome]:
        if self._lost_after is not None and self._ended >= self._lost_after:
            raise RunnerLost("the server is gone")
        outcomes = []
        for _ in range(min(self._at_once, len(self._queue))):
            line = self._queue[self._pick % len(self._queue)]
            self._queue.remove(line)
            outcomes.append(self._answer(line))
        self._ended += len(outcomes)
        return outcomes

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def close(self) -> None:
        self.closed += 1


class StandInBackend:
    """A backend that opens one runner after another."""

    def __init__(self, *runners: StandIn, name: str = "stand-in") -> None:
        self.runners = deque(runners)
        self.name = name

    def model_name(self) -> str:
        return self.name

    def open(self, say: Any) -> StandIn:
        return self.runners.popleft()
