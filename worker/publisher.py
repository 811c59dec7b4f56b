"""Writes what the engine says to Redis: token events in one script call, and the commit of each end.

A thread of its own, so that the tick never waits for Redis. It writes every `flush_s`, and at once what somebody
waits for: each write wakes this thread and the server, on cores that a model on a CPU needs for itself. While Redis
is away it keeps trying with what it has; appending a token twice changes nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from shared.jobs import JobStore
from shared.records import job_object
from shared.stream import Append, EventWriter, dumps, token_data
from shared.work import End
from worker import logprobs
from worker.answer import CallDelta, Delta
from worker.embedding import to_base64
from worker.finaliser import Finaliser, Outcome
from worker.held import HeldJob
from worker.requests import Ended, Event, HandedBack, Started, Token

log = logging.getLogger("slotline.publisher")

RETRY_S = 0.25
FOR_EVER_S = 10 * 366 * 86_400


class Publisher:
    """Takes lists of events from any thread and writes them in order."""

    def __init__(
        self,
        store: JobStore,
        held: Mapping[str, HeldJob],
        finaliser: Finaliser,
        on_lost: Callable[[str], None],
        flush_s: float = 0.0,
        abandon: threading.Event | None = None,
        on_defect: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._held = held
        self._finaliser = finaliser
        self._on_lost = on_lost
        self._flush_s = flush_s
        self._abandon = abandon or threading.Event()
        self._on_defect = on_defect
        self._urgent = threading.Event()
        self._writer = EventWriter(store.client, store.stream)
        self._queue: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="publisher")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is there and end the thread."""
        self._queue.put(None)
        self._urgent.set()
        self._thread.join()

    def put(self, events: list[Event]) -> None:
        """Queue the events of one tick."""
        self._queue.put(events)
        if any(map(_is_urgent, events)):
            self._urgent.set()

    def _run(self) -> None:
        going = True
        next_write = 0.0
        while going:
            batch = [self._queue.get()]
            self._urgent.wait(max(0.0, next_write - time.monotonic()))
            self._urgent.clear()
            next_write = time.monotonic() + self._flush_s
            while not self._queue.empty():
                batch.append(self._queue.get())
            going = None not in batch
            events = [event for tick in batch if tick is not None for event in tick]
            try:
                self._insist(events)
            except Exception:
                # What these events said is lost here, so nothing of this process can be trusted to end well.
                log.critical("a defect in publishing", exc_info=True)
                self._on_defect()
        self._writer.close()

    def _insist(self, events: list[Event]) -> None:
        """Write the events, however long Redis is away."""
        tokens = [_entry(e) for e in events if isinstance(e, Started | Token) and not _is_tail(e)]
        # The engine says them together with the end, and with that they are written.
        tails = {e.request.execution: _entry(e).data for e in events if isinstance(e, Token) and _is_tail(e)}
        ends = [e for e in events if isinstance(e, Ended)]
        back = [self._held.get(e.request.execution) for e in events if isinstance(e, HandedBack)]
        self._until_done(lambda: self._send(tokens, settle=bool(ends or back)))
        self._until_done(lambda: self._close(ends, tails))
        if back:
            self._finaliser.put(*(Outcome("handed_back", held) for held in back if held is not None))

    def _until_done(self, write: Callable[[], None]) -> None:
        while not self._abandon.is_set():
            try:
                write()
                return
            except RedisError as error:
                log.warning("Redis did not take what was written, trying again: %s", error)
                self._abandon.wait(RETRY_S)
        log.error("given up: the jobs of what could not be written go on elsewhere")

    def _send(self, tokens: list[Append], settle: bool) -> None:
        """Write tokens; before an end or a hand-back, wait until they are there."""
        lost = self._writer.send(tokens) if tokens else []
        if settle:
            lost += self._writer.settle()
        for execution in dict.fromkeys(lost):
            self._on_lost(execution)

    def _close(self, ends: list[Ended], tails: Mapping[str, str]) -> None:
        """Commit ends and pass on what came of them. Nothing is passed on before all of it is certain."""
        pairs = [(end, held) for end in ends if (held := self._held.get(end.request.execution)) is not None]
        retries = [
            Outcome("retry", held, message=end.error.message)
            for end, held in pairs
            if end.error is not None and _is_tried_again(end, held)
        ]
        committed = self._commit(
            [(end, held, _final(end, held)) for end, held in pairs if not _is_tried_again(end, held)], tails
        )
        if retries or committed:
            self._finaliser.put(*retries, *committed)

    def _commit(self, ends: list[tuple[Ended, HeldJob, dict[str, Any]]], tails: Mapping[str, str]) -> list[Outcome]:
        if not ends:
            return []
        sent = [_end(end, held, final, tails.get(held.execution.id, "")) for end, held, final in ends]
        committed = self._store.commit(sent)
        outcomes, cancelled = [], []
        for (end, held, final), one, outcome in zip(ends, sent, committed, strict=True):
            if outcome == "cancelled":
                cancelled.append((end, held, _final(end, held, cancelled=True)))
            elif outcome == "lost":
                self._on_lost(held.execution.id)
            elif outcome == "gone":
                outcomes.append(Outcome("gone", held))
            else:
                # `ended`: an earlier try of ours, whose reply was lost. What it wrote is what counts.
                written = self._store.stream.last(held.id) if outcome == "ended" else None
                if written and written.is_terminal:
                    outcomes.append(_outcome(held, written.json(), written.data))
                else:
                    outcomes.append(_outcome(held, final, one.data))
        return outcomes + self._commit(cancelled, tails)


def _is_tried_again(end: Ended, held: HeldJob) -> bool:
    return end.error is not None and end.error.retryable and held.record.retries_left > 0


def _outcome(held: HeldJob, final: dict[str, Any], data: str) -> Outcome:
    """RQ has a status of its own for what its stop commands ended."""
    stopped = held.stopped and final["status"] == "cancelled"
    return Outcome("stopped" if stopped else final["status"], held, final, data)


def _is_tail(event: Event) -> bool:
    """Whether it is what was held back of an answer to its very end."""
    return isinstance(event, Token) and event.token is None


def _is_urgent(event: Event) -> bool:
    """A job's start, first token and end go out at once; the tokens between them may wait for each other."""
    return not isinstance(event, Token) or event.index == len(event.request.generated)


def _entry(event: Started | Token) -> Append:
    request = event.request
    if isinstance(event, Started):
        name = "resumed" if event.resumed else "started"
        data: dict[str, Any] = {"prompt_tokens": len(request.prompt), "tokens": len(request.generated)}
        return Append(request.id, request.execution, f"{len(request.generated)}-*", name, dumps(data))
    return Append(request.id, request.execution, f"{event.index + 1}-0", "token", _token_data(event))


def _token_data(event: Token) -> str:
    if event.delta is None and event.logprob is None:
        return token_data(event.index, event.text, event.token)
    data = {"index": event.index, "text": event.text, "token": event.token}
    if event.delta is not None:
        data |= _more_than_text(event.delta)
    if event.logprob is not None:
        data["logprobs"] = logprobs.to_json(event.logprob)
    return dumps(data)


def _more_than_text(delta: Delta) -> dict[str, Any]:
    """The parts of a `TokenEvent` that are only there where they say something."""
    more: dict[str, Any] = {}
    if delta.reasoning:
        more["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        more["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return more


def _call_delta(call: CallDelta) -> dict[str, Any]:
    head = {} if call.id is None else {"id": call.id, "type": "function"}
    name = {} if call.name is None else {"name": call.name}
    return {"index": call.index, **head, "function": {**name, "arguments": call.arguments}}


def _end(end: Ended, held: HeldJob, final: dict[str, Any], tail: str) -> End:
    ttl_s = _ttl_s(held, final["status"])
    # A log that is gone with the record could not tell its last readers the end.
    log_ttl_s = FOR_EVER_S if ttl_s is None else max(60, ttl_s)
    return End(held.id, end.request.execution, final, end.tokens, log_ttl_s, tail)


def _ttl_s(held: HeldJob, status: str) -> int | None:
    """How long the record is kept; None for ever (RQ: below 0)."""
    ttl_s = held.failure_ttl_s if status == "failed" else held.result_ttl_s
    return ttl_s if ttl_s >= 0 else None


def _final(end: Ended, held: HeldJob, cancelled: bool = False) -> dict[str, Any]:
    """The job object of an ended job."""
    error = end.error
    failed = error is not None and not cancelled
    ended_by_hand = cancelled or end.finish_reason == "cancelled"
    status: Any = "cancelled" if ended_by_hand else "failed" if failed else "completed"
    never_ran = end.stats.seq_id is None and not end.request.generated
    return job_object(
        replace(held.record, started_at=None) if never_ran else held.record,
        status=status,
        detail="stopped" if held.stopped and ended_by_hand else None,
        ended_at=time.time(),
        ttl_s=_ttl_s(held, status),
        text=None if end.request.embed else end.text,
        reasoning_content=end.reasoning,
        tool_calls=_tool_calls(end) or None,
        logprobs=None if end.logprobs is None else [logprobs.to_json(logprob) for logprob in end.logprobs],
        embedding=None if end.embedding is None else to_base64(end.embedding),
        finish_reason="cancelled" if ended_by_hand else end.finish_reason,
        usage=None if never_ran else _usage(end),
        timings=None if never_ran else _timings(end),
        seed=None if never_ran or end.request.embed else end.request.params.seed,
        error=error.to_dict() if failed and error is not None else None,
    )


def _tool_calls(end: Ended) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in end.tool_calls
    ]


def _usage(end: Ended) -> dict[str, int]:
    stats = end.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "cached_tokens": stats.cached_tokens,
    }


def _timings(end: Ended) -> dict[str, float]:
    stats = end.stats
    computed = max(0, stats.prompt_tokens - stats.cached_tokens)
    return {
        "queue_ms": round(stats.waited_s * 1000, 3),
        "prompt_ms": round(stats.prompt_s * 1000, 3),
        "generation_ms": round(stats.generation_s * 1000, 3),
        "ttft_ms": round(stats.ttft_s * 1000, 3),
        "duration_ms": round(stats.duration_s * 1000, 3),
        "prompt_tokens_per_s": round(computed / stats.prompt_s, 3) if stats.prompt_s > 0 else 0.0,
        "generation_tokens_per_s": round(stats.generated_tokens / stats.generation_s, 3)
        if stats.generation_s > 0
        else 0.0,
    }
