"""Writes what the engine says to Redis: token events in one script call, and the commit of each end.

A thread of its own, so that the tick never waits for Redis. It writes every `flush_s`, and at once what somebody
waits for: each write wakes this thread and the server, on cores that a model on a CPU needs for itself.

While Redis is away it keeps trying with what it has; appending a token twice changes nothing. What the engine says
meanwhile waits here in its order, and is written in slices that Redis takes well within a command's time limit. There
is no end to an outage but to what can wait: without Redis no job is pulled, so it is at most the tokens that the jobs
already held may still generate, some 250 bytes each.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisError

from shared.jobs import JobStore
from shared.records import job_object
from shared.stream import PROGRESS, Append, EventWriter, dumps, token_data
from shared.work import End, log_ttl_s
from worker import logprobs
from worker.answer import CallDelta, Delta
from worker.embedding import to_base64
from worker.finaliser import Finaliser, Outcome
from worker.held import HeldJob
from worker.journal import Journal
from worker.requests import Ended, Event, HandedBack, Paused, Progress, Started, Token

log = logging.getLogger("slotline.publisher")

RETRY_S = 0.25
#: When nothing more is said for so long, the answer to what was written last is looked at.
SETTLE_S = 1.0
#: Most events, and most ends, that one script call writes.
EVENTS_AT_ONCE, ENDS_AT_ONCE = 2000, 100

T = TypeVar("T")

#: What goes out as it is, by `append`.
Written = Started | Progress | Paused | Token


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
        owns: Callable[[HeldJob], bool] = lambda held: False,
    ) -> None:
        """Publish for the jobs in `held`.

        Args:
            store: where to.
            held: by execution.
            finaliser: is told what came of each end.
            on_lost: called with each execution that may write no more.
            flush_s: how often to write.
            abandon: once set, what Redis does not take is given up.
            on_defect: called when something was lost that only this process knew.
            owns: asked when Redis refused to write for a job: whether it is ours all the same, after registering it
                again if Redis had forgotten that.
        """
        self._store = store
        self._held = held
        self._finaliser = finaliser
        self._on_lost = on_lost
        self._flush_s = flush_s
        self._abandon = abandon or threading.Event()
        self._on_defect = on_defect
        self._owns = owns
        #: What was said, in case that Redis comes back without its last seconds.
        self.journal = Journal()
        self._forgotten = threading.Event()
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

    def say_again(self) -> None:
        """Write again all that was said of the jobs at hand, of which Redis may have forgotten some."""
        self._forgotten.set()
        self.put([])

    def _run(self) -> None:
        going = True
        next_write = 0.0
        while going:
            batch = self._next_ticks()
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

    def _next_ticks(self) -> list[list[Event] | None]:
        """What was said next; nothing after a while in which nothing was, if there is a reply to be looked at."""
        try:
            return [self._queue.get(timeout=SETTLE_S if self._writer.is_waiting else None)]
        except queue.Empty:
            return []

    def _insist(self, events: list[Event]) -> None:
        """Write the events, however long Redis is away."""
        written = [_entry(e) for e in _newest_progress(events) if isinstance(e, Written) and not _is_tail(e)]
        # The engine says them together with the end, and with that they are written.
        tails = {e.request.execution: e for e in events if isinstance(e, Token) and _is_tail(e)}
        ends = [e for e in events if isinstance(e, Ended)]
        back = [
            Outcome("handed_back", held, slot_time=e.request.slot_time)
            for e in events
            if isinstance(e, HandedBack) and (held := self._held.get(e.request.execution)) is not None
        ]
        if self._forgotten.is_set():
            self._forgotten.clear()
            for execution in list(self._held):
                self._until_done(partial(self._mend, [execution]))
        self.journal.note(e for e in written if e.at and e.execution in self._held)
        for some in _slices(written, EVENTS_AT_ONCE):
            self._until_done(partial(self._send, some))
        if ends or back or not events:
            self._until_done(self._settle)
        for few in _slices(ends, ENDS_AT_ONCE):
            self._until_done(partial(self._close, few, tails))
        if back:
            for outcome in back:
                self.journal.forget(outcome.held.execution.id)
            self._finaliser.put(*back)

    def _until_done(self, write: Callable[[], None]) -> None:
        while not self._abandon.is_set():
            try:
                write()
                return
            except RedisError as error:
                log.warning("Redis did not take what was written, trying again: %s", error)
                self._abandon.wait(RETRY_S)
        log.error("given up: the jobs of what could not be written go on elsewhere")

    def _send(self, events: Sequence[Append]) -> None:
        """Write events, without waiting until they are there."""
        self._mend(self._writer.send(events))

    def _settle(self) -> None:
        """Wait until all events are there, which comes before an end or a hand-back."""
        self._mend(self._writer.settle())

    def _mend(self, refused: Iterable[str]) -> None:
        """Say all again of the jobs for which events were refused, or drop them."""
        for execution in dict.fromkeys(refused):
            held = self._held.get(execution)
            if held is None or not self._rewrite(held):
                self._on_lost(execution)

    def _rewrite(self, held: HeldJob) -> bool:
        """Write again what Redis may have forgotten of a job; False if it is not ours, or its log lacks even more."""
        said = self.journal.said(held.execution.id)
        return self._owns(held) and not any(map(self._store.stream.append, _slices(said, EVENTS_AT_ONCE)))

    def _close(self, ends: Sequence[Ended], tails: Mapping[str, Token]) -> None:
        """Commit ends and pass on what came of them. Nothing is passed on before all of it is certain."""
        pairs = [(end, held) for end in ends if (held := self._held.get(end.request.execution)) is not None]
        retries = [
            Outcome("retry", held, message=end.error.message, slot_time=end.slot_time)
            for end, held in pairs
            if end.error is not None and _is_tried_again(end, held)
        ]
        committed = self._commit(
            [(end, held, self._final(end, held)) for end, held in pairs if not _is_tried_again(end, held)], tails
        )
        if retries or committed:
            for outcome in retries:
                self.journal.forget(outcome.held.execution.id)
            self._finaliser.put(*retries, *committed)

    def _final(self, end: Ended, held: HeldJob) -> dict[str, Any]:
        """The job object of an ended job. An end that Redis forgot is said again as it was."""
        before = self.journal.ending(held.execution.id)
        return _final(end, held) if before is None else before.final

    def _commit(
        self, ends: list[tuple[Ended, HeldJob, dict[str, Any]]], tails: Mapping[str, Token], mended: bool = False
    ) -> list[Outcome]:
        """Commit ends; what Redis may have forgotten is first said again, once."""
        if not ends:
            return []
        sent = [_end(end, held, final, tails.get(held.execution.id), mended) for end, held, final in ends]
        committed = self._store.commit(sent)
        outcomes, cancelled, again = [], [], []
        for (end, held, final), one, outcome in zip(ends, sent, committed, strict=True):
            execution = held.execution.id
            if outcome == "cancelled":
                cancelled.append((end, held, _final(end, held, cancelled=True)))
            elif outcome in ("behind", "lost", "gone") and not mended and (self._rewrite(held) or outcome == "behind"):
                again.append((end, held, final))
            elif outcome == "lost":
                self._on_lost(execution)
            elif outcome == "gone":
                self.journal.forget(execution)
                outcomes.append(Outcome("gone", held))
            else:
                # `ended`: an earlier try of ours, whose reply was lost. What it wrote is what counts.
                written = self._store.stream.last(held.id) if outcome == "ended" else None
                what, data = (written.json(), written.data) if written and written.is_terminal else (final, one.data)
                self.journal.end(held, what, [*filter(None, [tails.get(execution)]), end])
                outcomes.append(_outcome(held, what, data))
        return outcomes + self._commit(cancelled, tails, mended) + self._commit(again, tails, mended=True)


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
    if isinstance(event, Token):
        return event.index == len(event.request.generated)
    return not isinstance(event, Progress)


def _newest_progress(events: Sequence[Event]) -> list[Event]:
    """Without what was said of a job's progress before it said more: after an outage that would all come at once."""
    newest = {event.request.execution: event for event in events if isinstance(event, Progress)}
    return [e for e in events if not isinstance(e, Progress) or newest[e.request.execution] is e]


def _entry(event: Written) -> Append:
    request = event.request
    if isinstance(event, Progress):
        return Append(request.id, request.execution, "", PROGRESS, dumps({"done": event.done, "total": event.total}))
    if isinstance(event, Paused):
        data: dict[str, Any] = {"tokens": event.tokens, "reason": event.reason}
        return Append(request.id, request.execution, f"{event.tokens}-*", "paused", dumps(data))
    if isinstance(event, Started):
        name = "resumed" if event.resumed else "started"
        data = {"prompt_tokens": len(request.prompt), "tokens": len(request.generated)}
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


def _end(end: Ended, held: HeldJob, final: dict[str, Any], tail: Token | None, mended: bool) -> End:
    ttl_s = held.failure_ttl_s if final["status"] == "failed" else held.result_ttl_s
    # A log that could not be mended keeps nobody from the whole text, which is in the end.
    needed = 0 if mended else end.tokens - (tail is not None)
    data = "" if tail is None else _entry(tail).data
    return End(held.id, end.request.execution, final, end.tokens, log_ttl_s(ttl_s), data, needed)


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


def _slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]
