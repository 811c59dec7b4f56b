"""The tick loop: finish, admit, plan, decode, sample, emit.

The engine owns the model and the slots. Requests come in through `submit`, results leave as events handed to
`emit`, one list a tick. It knows neither Redis nor RQ.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shared.errors import BadLogits, DecodeFailed, GenerationTimeout, InternalError, QueueTimeout, SlotlineError
from shared.schemas import FinishReason
from worker import telemetry
from worker.admission import has_room, refusal
from worker.backend import Backend, BatchItem, DecodeOutcome, Logits, TokenSampler
from worker.batching import BatchPlan, BatchStrategy, SlotView
from worker.embedding import unit
from worker.ending import as_ours, ending
from worker.logprobs import RowLogprobs
from worker.prefix_cache import PrefixCache
from worker.requests import Ended, Event, HandedBack, Outbox, Request, Started, Stats, Token
from worker.sampler import best_of_rows, make_sampler
from worker.slots import Slot, SlotPool
from worker.text import Transcript, transcript_of

log = logging.getLogger("slotline.engine")

Emit = Callable[[list[Event]], None]

#: Defects in a row after which the engine gives up, so that a fresh process can take over.
MAX_DEFECTS = 3


class Engine:
    """Continuous batching over one model.

    `submit`, `cancel`, `drop`, `hand_back`, `stop` and the figures may be used from any thread; `tick` and `run`
    belong to one.
    """

    def __init__(
        self,
        backend: Backend,
        strategy: BatchStrategy,
        emit: Emit,
        *,
        name: str = "engine",
        n_parallel: int = 4,
        chunk_size: int = 512,
        kv_unified: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.backend = backend
        self.pool = SlotPool(n_parallel)
        self.cache = PrefixCache(self.pool, backend)
        self.waiting: deque[Request] = deque()
        self.queue_depth = 0
        self.ticks = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.last_tick_at = clock()
        self._strategy = strategy
        self._emit = emit
        self._chunk_size = chunk_size
        self._kv_cells = backend.info.n_ctx if kv_unified else None
        self._clock = clock
        self._outbox = Outbox()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._take_results = self._sample if backend.info.n_embd is None else self._embed

    # --- from any thread ---

    def submit(self, request: Request) -> None:
        """Queue a request for the next free slot."""
        self._post(partial(self.waiting.append, request))

    def cancel(self, execution: str) -> None:
        """End the request of an execution at the next tick, as `cancelled`; nothing happens if it is not here.

        Requests are told apart by their execution: a job that was taken over and came back has another one.
        """
        self._post(partial(self._cancel, execution))

    def decline(self, request: Request) -> None:
        """End a request as `cancelled` at the next tick, without a slot: nobody waits for it any more."""
        self._post(partial(self._refuse, request, None, "cancelled"))

    def drop(self, execution: str) -> None:
        """Forget the request of an execution at the next tick without a word: it has another owner now."""
        self._post(partial(self._drop, execution))

    def hand_back(self, running: bool) -> None:
        """Give up all waiting requests, and the running ones too if asked, as `HandedBack`."""
        self._post(partial(self._hand_back, running))

    def stop(self) -> None:
        """Let `run` return after the current tick."""
        self._stopping = True
        self._wake.set()

    @property
    def last_tick_age_s(self) -> float:
        """Time since the loop last went round, idle or not."""
        return self._clock() - self.last_tick_at

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    # --- on the engine thread ---

    def run(self) -> None:
        """Tick until stopped; wait while there is nothing to do.

        Raises:
            Exception: whatever went wrong `MAX_DEFECTS` times in a row.
        """
        defects = 0
        while not self._stopping:
            self._wake.clear()
            try:
                worked = self.tick()
                defects = 0 if worked else defects
            except Exception as error:
                log.exception("a defect in the tick; its requests fail, the others go on")
                self._fail_active(InternalError(f"{type(error).__name__}: {error}"))
                defects += 1
                if defects == MAX_DEFECTS:
                    raise
                worked = True
            if not worked:
                self._wake.wait(timeout=0.5)

    def tick(self) -> bool:
        """Go round once. Returns whether there was anything to compute."""
        now = self.last_tick_at = self._clock()
        self._receive()
        self._finish(now)
        self._admit(now)
        plan = self._plan()
        computed = bool(plan.items) and self._decode(plan)
        if computed:
            self._take_results(plan, self._clock())
        if events := self._outbox.take():
            self._emit(events)
        return bool(plan.items)

    def _receive(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _finish(self, now: float) -> None:
        for slot in self.pool.active:
            request = slot.request
            if request is not None and slot.used_s(now) > request.timeout_s:
                message = f"the job used up its {request.timeout_s:g} s of time in a slot"
                self._end(slot, now, "timeout", GenerationTimeout(message, "timeout_s"))
        for request in [r for r in self.waiting if r.start_by is not None and now > r.start_by]:
            self.waiting.remove(request)
            self._refuse(request, QueueTimeout("the job was not started within its queue_timeout_s", "queue_timeout_s"))

    def _admit(self, now: float) -> None:
        while self.waiting and self.pool.idle:
            request = self.waiting[0]
            if error := refusal(request, self.backend.info):
                self._refuse(self.waiting.popleft(), error)
            elif self._kv_cells is None or has_room(request, self.pool, self.cache, self._kv_cells):
                self._start(self.waiting.popleft(), now)
            else:
                return

    def _start(self, request: Request, now: float) -> None:
        """Give a request a slot; whatever goes wrong with its tokens so far ends it alone."""
        sampler: TokenSampler | None = None
        try:
            transcript = self._transcript(request)
            sampler = make_sampler(self.backend, request.params)
            for token in request.generated:
                sampler.accept(token)
        except Exception as error:
            if sampler is not None:
                sampler.close()
            self._refuse(request, as_ours(error))
            return
        slot, kept = self.cache.claim(request)
        self.pool.acquire(slot, request, sampler, transcript, kept, now)
        self._outbox.add(Started(request, resumed=bool(request.generated)))
        # Interrupted between its last token and its end, or nothing to say at all.
        if not request.embed and (reason := slot.finish_reason):
            self._end(slot, now, reason)

    def _transcript(self, request: Request) -> Transcript:
        return transcript_of(self.backend.vocab, request.stop, request.format, request.generated)

    def _plan(self) -> BatchPlan:
        views = [SlotView(s.seq_id, s.remaining, self._chunk_size) for s in self.pool.active]
        return self._strategy.plan(views, self.backend.info.n_batch) if views else BatchPlan()

    def _decode(self, plan: BatchPlan) -> bool:
        """One forward pass. Returns whether the plan was computed; if not, its slots are dealt with."""
        slots = self.pool.slots
        items = [
            BatchItem(i.slot, s.n_past, s.tokens[s.n_past : s.n_past + i.tokens], i.wants_logits)
            for i in plan.items
            for s in (slots[i.slot],)
        ]
        began = self._clock()
        outcome = self.backend.decode(items)
        if outcome is DecodeOutcome.NO_ROOM and self.cache.evict(self.cache.tokens):
            outcome = self.backend.decode(items)
        if outcome is DecodeOutcome.DONE:
            self._computed(plan, (self._clock() - began) * 1000)
            return True
        if outcome is DecodeOutcome.NO_ROOM:
            self._make_room()
        else:
            for item in plan.items:
                self._break(slots[item.slot], DecodeFailed("llama.cpp failed the forward pass"))
        return False

    def _computed(self, plan: BatchPlan, eval_ms: float) -> None:
        decode = prefill = 0
        for item in plan.items:
            slot = self.pool.slots[item.slot]
            if slot.remaining == 1 and slot.generated:
                decode += 1
            else:
                prefill += item.tokens
            slot.computed(item.tokens)
        self.ticks += 1
        self.tokens += decode
        self.prompt_tokens += prefill
        telemetry.send(
            telemetry.tick,
            self,
            tick=telemetry.Tick(
                batch_size=decode + prefill,
                decode_tokens=decode,
                prefill_tokens=prefill,
                active_slots=len(self.pool) - len(self.pool.idle),
                queue_depth=self.queue_depth + len(self.waiting),
                eval_ms=eval_ms,
            ),
        )

    def _make_room(self) -> None:
        """Pause the youngest request; one that has the cache to itself can never fit."""
        *others, youngest = self.pool.active
        if not others:
            self._break(youngest, DecodeFailed("the KV cache has no room for this request alone"))
            return
        used_s = youngest.used_s(self._clock())
        tokens, logprobs = tuple(youngest.tokens), tuple(youngest.logprobs)
        request = self._release(youngest, keep=False)
        answer = tokens[len(request.prompt) :]
        # It has been started, so it can no longer come too late.
        self.waiting.appendleft(
            replace(request, generated=answer, logged_logprobs=logprobs, used_s=used_s, start_by=None)
        )

    def _sample(self, plan: BatchPlan, now: float) -> None:
        slots = [self.pool.slots[item.slot] for item in plan.items if item.wants_logits]
        if not slots:
            return
        rows = self.backend.logits()
        for row, (slot, best) in enumerate(zip(slots, best_of_rows(rows), strict=True)):
            if best is None:
                self._break(slot, BadLogits("the model computed no finite logit for this job"))
                continue
            try:
                token = self._next(slot, rows, row, best, now)
            except Exception as error:
                self._end(slot, now, None, as_ours(error))
                continue
            if token is not None:
                self._outbox.add(token)
            if reason := "stop" if token is None else slot.finish_reason:
                self._end(slot, now, reason)

    def _next(self, slot: Slot, rows: Logits, row: int, best: int, now: float) -> Token | None:
        """The next token of a slot and what it says; None at the end of the answer."""
        request, sampler, transcript = slot.request, slot.sampler, slot.transcript
        assert request is not None and sampler is not None and transcript is not None
        params, vocab = request.params, self.backend.vocab
        # Before the sampler, which may change the row in place.
        raw = RowLogprobs(rows[row], request.logprobs) if request.logprobs is not None else None
        token: int | None = best
        if not slot.is_argmax or (params.ignore_eos and best in vocab.eog):
            token = sampler.sample(row, slot.generated)
        if token is None or (token in vocab.eog and not params.ignore_eos):
            return None
        text, delta = transcript.push(token)
        logprob = None
        if raw is not None:
            logprob = raw.of(token, vocab)
            slot.logprobs.append(logprob)
        return Token(request, slot.append(token, now), token, text, delta, logprob)

    def _embed(self, plan: BatchPlan, now: float) -> None:
        for slot in [self.pool.slots[item.slot] for item in plan.items]:
            try:
                embedding = unit(self.backend.embedding(slot.seq_id))
            except Exception as error:
                self._end(slot, now, None, as_ours(error))
                continue
            self._end(slot, now, "stop", embedding=embedding)

    # --- ends ---

    def _end(
        self,
        slot: Slot,
        now: float,
        reason: FinishReason | None,
        error: SlotlineError | None = None,
        embedding: Logits | None = None,
    ) -> None:
        transcript, logprobs, stats = slot.transcript, tuple(slot.logprobs), slot.stats(now)
        assert slot.request is not None and transcript is not None
        request = self._release(slot, keep=slot.request.cache_prompt and not slot.request.embed)
        self._say(*ending(request, transcript, stats, reason, error, logprobs, embedding))

    def _refuse(self, request: Request, error: SlotlineError | None, reason: FinishReason | None = None) -> None:
        """End a request that never had a slot (this time)."""
        stats = Stats(len(request.prompt), len(request.generated), 0, request.waited_s, 0, 0, 0, None)
        try:
            transcript = self._transcript(request)
        except Exception as defect:
            transcript = Transcript(self.backend.vocab.piece)
            error, reason = error or as_ours(defect), None
        self._say(*ending(request, transcript, stats, reason, error, request.logged_logprobs))

    def _say(self, tail: Token | None, ended: Ended) -> None:
        if tail is not None:
            self._outbox.add(tail)
        self._outbox.add(ended)
        outcome = ended.finish_reason or (ended.error.code if ended.error else "unknown")
        done = telemetry.RequestDone.of(self.name, ended.request, ended.stats, outcome)
        telemetry.send(telemetry.request_done, self, done=done)

    def _break(self, slot: Slot, error: SlotlineError) -> None:
        """End a request whose sequence can no longer be trusted."""
        self._end(slot, self._clock(), None, error)
        self.cache.drop(slot)

    def _release(self, slot: Slot, keep: bool) -> Request:
        request = self.pool.release(slot, self._clock(), keep)
        if not keep:
            self.backend.clear(slot.seq_id)
        return request

    def _fail_active(self, error: SlotlineError) -> None:
        for slot in self.pool.active:
            self._break(slot, error)
        if events := self._outbox.take():
            self._emit(events)

    # --- commands ---

    def _find(self, execution: str) -> tuple[Slot | None, Request | None]:
        for slot in self.pool.active:
            if slot.request is not None and slot.request.execution == execution:
                return slot, slot.request
        return None, next((r for r in self.waiting if r.execution == execution), None)

    def _cancel(self, execution: str) -> None:
        slot, request = self._find(execution)
        if slot is not None:
            self._end(slot, self._clock(), "cancelled")
        elif request is not None:
            self.waiting.remove(request)
            self._refuse(request, None, "cancelled")

    def _drop(self, execution: str) -> None:
        slot, request = self._find(execution)
        if slot is not None:
            self._release(slot, keep=False)
        elif request is not None:
            self.waiting.remove(request)

    def _hand_back(self, running: bool) -> None:
        for slot in self.pool.active if running else []:
            self._outbox.add(HandedBack(self._release(slot, keep=False)))
        while self.waiting:
            self._outbox.add(HandedBack(self.waiting.popleft()))

    def check_integrity(self) -> None:
        """Raise AssertionError where slots or cache contradict themselves."""
        self.pool.check_integrity()
        self.cache.check_integrity()
