"""The lines of a batch that are being run: their jobs go out one by one and come back as rows."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shared.batches.feeding import Feed
from shared.batches.lines import Line
from shared.batches.records import BatchRecord, Lines
from shared.batches.rows import Row, answer_id, answered, not_run, refused, request_id
from shared.errors import IdConflict, JobRemoved, SlotlineError
from shared.names import DEFAULT_MODEL
from shared.openai.exchange import Call, Exchange, failure_of, read_exchange
from shared.schemas import JobRequest

log = logging.getLogger("slotline.batches")

#: A job that vanishes is submitted so many times in all.
MAX_SUBMITS = 4

#: How long an ended job may wait for a runner to fetch it: its record is the only copy of its result.
RESULT_TTL_S = 7 * 86_400


@dataclass(slots=True, eq=False)
class Pending:
    """A line that is being run: a job for each choice, and the job objects of those that have completed."""

    line: Line
    exchange: Exchange
    requests: dict[str, JobRequest]
    finals: dict[str, dict[str, Any]] = field(default_factory=dict)
    submits: dict[str, int] = field(default_factory=dict)


class Flight:
    """The jobs of one batch that are out. One thread only.

    A method that raises, because Redis cannot be reached, has forgotten nothing and can be called again.
    """

    def __init__(self, feed: Feed, batch: BatchRecord) -> None:
        self._feed = feed
        self._batch = batch
        self._model = batch.model or DEFAULT_MODEL
        self._out: dict[str, Pending] = {}
        #: Jobs of lines that were taken, to be submitted in this order.
        self._due: deque[tuple[str, Pending]] = deque()
        self._told: dict[str, None] = {}
        self._unwanted: set[str] = set()
        self._rows: list[Row] = []

    @property
    def out(self) -> int:
        """Jobs that were submitted and have not come back."""
        return len(self._out)

    @property
    def is_empty(self) -> bool:
        """Whether every line that was taken has become a row."""
        return not (self._out or self._due or self._rows)

    def take(self, line: Line) -> list[Row]:
        """Make a line's jobs due; of one whose body cannot be served, give the row at once."""
        try:
            exchange = read_exchange(self._batch.endpoint, line.body)
            requests = exchange.jobs()
        except SlotlineError as error:
            return [refused(self._batch.id, line, error)]
        name = request_id(self._batch.id, line.number)
        life = f"-r{self._batch.retries}" if self._batch.retries else ""
        jobs = {f"{name}-{choice}{life}": _as_batch(request) for choice, request in enumerate(requests)}
        pending = Pending(line, exchange, jobs)
        self._due.extend((job_id, pending) for job_id in jobs)
        return []

    def submit_next(self) -> bool:
        """Submit a job that is due; False where there is none.

        Raises:
            QueueFull: the model takes no more now.
        """
        if not self._due:
            return False
        job_id, pending = self._due[0]
        parent = request_id(self._batch.id, pending.line.number)
        try:
            self._feed.submit(job_id, pending.requests[job_id], self._model, parent)
        except IdConflict as error:
            self._fail(pending, error)
            return True
        self._out[job_id] = pending
        self._due.popleft()
        return True

    def adopt(self) -> int:
        """Find the jobs that are due but were submitted by a runner before us; how many there are."""
        found = set(self._feed.find(job_id for job_id, _ in self._due))
        self._out |= {job_id: pending for job_id, pending in self._due if job_id in found}
        self._due = deque(due for due in self._due if due[0] not in found)
        return len(found)

    def left_over(self, done: Lines) -> list[str]:
        """Jobs of lines that have a row, which a runner before us had no time to discard."""
        prefix = f"{self._batch.id}-"
        marked = self._feed.marked()
        numbers = {job_id: int(job_id.removeprefix(prefix).split("-")[0]) for job_id in marked}
        self._feed.unmark(job_id for job_id in marked if numbers[job_id] not in done)
        return [job_id for job_id in marked if numbers[job_id] in done]

    def collect(self, wait_s: float) -> list[Row]:
        """The lines that are through, after at most `wait_s` if no job has ended yet."""
        waits = not (self._rows or self._told or self._unwanted)
        self._told |= dict.fromkeys(self._feed.ended(wait_s if waits else 0))
        self._read_ended()
        self._cancel_unwanted()
        rows, self._rows = self._rows, []
        return rows

    def _read_ended(self) -> None:
        finals = self._feed.finals([job_id for job_id in self._told if job_id in self._out])
        for job_id, final in finals.items():
            pending = self._out.pop(job_id, None)
            if pending is not None:  # or its line has failed just now, by another of its jobs
                self._end(job_id, pending, final)
        self._told.clear()

    def _end(self, job_id: str, pending: Pending, final: dict[str, Any] | None) -> None:
        failure = None if final is None else failure_of(final)
        if final is None:
            self._submit_again(job_id, pending)
        elif failure is not None:
            self._fail(pending, failure)
        else:
            pending.finals[job_id] = final
            if len(pending.finals) == len(pending.requests):
                self._rows.append(self._answer(pending))

    def _submit_again(self, job_id: str, pending: Pending) -> None:
        count = pending.submits.get(job_id, 1)
        if count >= MAX_SUBMITS:
            self._fail(pending, JobRemoved(f"job {job_id!r} was removed {count} times before it had ended"))
            return
        log.warning("job %s is gone and is submitted again", job_id)
        pending.submits[job_id] = count + 1
        self._due.appendleft((job_id, pending))

    def _answer(self, pending: Pending) -> Row:
        finals = [pending.finals[job_id] for job_id in pending.requests]
        call = Call(answer_id(self._batch.id, pending.line), int(finals[0]["created_at"] or 0), self._model)
        body = pending.exchange.answer(call, finals)
        return answered(self._batch.id, pending.line, body, pending.requests)

    def _fail(self, pending: Pending, error: SlotlineError) -> None:
        """One choice decides for the line; its others are not wanted any more."""
        self._rows.append(refused(self._batch.id, pending.line, error, pending.requests))
        self._due = deque(due for due in self._due if due[1] is not pending)
        self._unwanted.update(job_id for job_id in pending.requests if self._out.pop(job_id, None))

    def _cancel_unwanted(self) -> None:
        if self._unwanted:
            self._feed.cancel(self._unwanted)
            self._unwanted.clear()

    def take_back(self) -> None:
        """Take the jobs that wait out of the queue; those that run go on."""
        stay = set(self._feed.withdraw(self._out))
        self._due.extend((job_id, pending) for job_id, pending in self._out.items() if job_id not in stay)
        self._out = {job_id: pending for job_id, pending in self._out.items() if job_id in stay}

    def cut_off(self, code: str) -> list[Row]:
        """Cancel everything and give a row for each line: its answer where that came in time, else `code`."""
        self._told |= dict.fromkeys(self._feed.cancel(self._out))
        self._read_ended()
        self._cancel_unwanted()
        left = dict.fromkeys([*self._out.values(), *(pending for _, pending in self._due)])
        rows, self._rows = self._rows, []
        rows += (not_run(self._batch.id, pending.line, code, pending.requests) for pending in left)
        self._out.clear()
        self._due.clear()
        return rows


def _as_batch(request: JobRequest) -> JobRequest:
    return request.model_copy(update={"priority": "batch", "result_ttl_s": RESULT_TTL_S, "stream": False})
