"""The tick loop: finish, admit, plan, decode, sample, emit.

The engine owns the model and the slots. Requests come in through `submit`, results leave as events handed to
`emit`, one list a tick. It knows neither Redis nor RQ.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from shared.errors import BadLogits, DecodeFailed, GenerationTimeout, InternalError, QueueTimeout, SlotlineError
from shared.records import SlotTime
from shared.schemas import FinishReason
from worker import telemetry
from worker.admission import refusal, to_displace
from worker.backend import Backend, BatchItem, DecodeOutcome, Logits, TokenSampler
from worker.batching import BatchPlan, BatchStrategy, SlotView
from worker.black_box import ADMISSION, BlackBox
from worker.embedding import unit
from worker.ending import as_ours, ending
from worker.loop import Loop
from worker.next_token import next_token
from worker.prefix_cache import PrefixCache
from worker.requests import Ended, Event, HandedBack, Outbox, Paused, Progress, Request, Started, Stats, Token
from worker.sampler import best_of_rows, make_sampler
from worker.slots import Slot, SlotPool
from worker.text import Transcript, transcript_of
from worker.turns import views_of
from worker.waiting import Place, WaitingLine

log = logging.getLogger("slotline.engine")

#: How often a request says how much of a long prompt is computed.
PROGRESS_S = 1.0
#: Weight of the request that ended last in the average of their times.
NEWEST_WEIGHT = 0.2

Emit = Callable[[list[Event]], None]
Observe = Callable[[BatchPlan, Sequence[SlotView], float], None]


class Engine(Loop):
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
        n_parallel: int | None = None,
        chunk_size: int = 512,
        pause_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        box: BlackBox | None = None,
    ) -> None:
        super().__init__(clock)
        self.name = name
        self.backend = backend
        self.box = box or BlackBox()
        self.pool = SlotPool(n_parallel or backend.info.n_parallel, self.box)
        self.cache = PrefixCache(backend)
        self.waiting = WaitingLine()
        self.queue_depth = 0
        #: Tokens computed so far, by the queue their requests came from.
        self.served: Counter[str] = Counter()
        #: Average time in a slot of the requests that ended last; None before the first.
        self.job_s: float | None = None
        #: How long the executions in slots have been in some, as of the last tick.
        self.slot_times: dict[str, SlotTime] = {}
        self.ticks = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self._strategy = strategy
        self._observe: Observe | None = getattr(strategy, "observe", None)
        self._emit = emit
        self._chunk_size = chunk_size
        self._pause_s = pause_s
        self._may_admit = True
        self._outbox = Outbox()
        self._take_results = self._sample if backend.info.n_embd is None else self._embed

    # --- from any thread ---

    def submit(self, request: Request) -> None:
        """Queue a request for the next free slot."""
        self._post(partial(self._arrive, request))

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

    # --- on the engine thread ---

    def run(self) -> None:
        """See `Loop`. Only meanwhile the black box counts ticks, so that no end of it looks like a stall."""
        try:
            super().run()
        finally:
            self.box.rest()

    def tick(self) -> bool:
        """Go round once. Returns whether there was anything to compute."""
        now = self.last_tick_at = self._clock()
        self.box.tick()
        self._receive()
        self._finish(now)
        self._admit(now)
        self._let_go(now)
        if self._must_unify():
            self._unify(now)
        self.cache.line_up()
        views, plan = self._plan(now)
        if plan.items:
            self._compute(views, plan)
        self.cache.count()
        if events := self._outbox.take():
            self._emit(events)
        return bool(plan.items)

    def _finish(self, now: float) -> None:
        slot_times: dict[str, SlotTime] = {}
        for slot in self.pool.active:
            request = slot.request
            assert request is not None
            if slot.used_s(now) > request.timeout_s:
                message = f"the job used up its {request.timeout_s:g} s of time in a slot"
                self._end(slot, now, "timeout", GenerationTimeout(message, "timeout_s"))
            else:
                slot_times[request.execution] = slot.slot_time(now)
        self.slot_times = slot_times
        for place in self.waiting.places:
            if place.request.start_by is not None and now > place.request.start_by:
                self._leave_line(place)
                message = "the job was not started within its queue_timeout_s"
                self._refuse(place.request, QueueTimeout(message, "queue_timeout_s"))

    def _admit(self, now: float) -> None:
        """Give slots to those that wait, in their order; a more urgent one takes them from less urgent ones.

        Whoever cannot start holds up those that are no more urgent, so that nobody is overtaken for ever. Nobody is
        looked at again before something has changed: looking takes time that grows with a prompt.
        """
        if not self._may_admit:
            return
        self._may_admit = False
        blocked: int | None = None
        for place in self.waiting.places:
            request = place.request
            if error := refusal(request, self.backend.info):
                self.waiting.remove(place)
                self._refuse(request, error)
            elif blocked is None or request.priority < blocked:
                victims = to_displace(request, self.pool, self.cache)
                if victims is None:
                    blocked = request.priority
                    continue
                for slot in victims:
                    self._pause(slot, now, displaced=True)
                self.waiting.remove(place)
                with self.box.working_on(ADMISSION, request.execution):
                    self._start(place, now)

    def _arrive(self, request: Request) -> None:
        self.waiting.add(request)
        self._may_admit = True

    def _start(self, place: Place, now: float) -> None:
        """Give a request a slot; whatever goes wrong with its tokens so far ends it alone."""
        request = place.request
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
        # Looked for again: those that were displaced may have left more of it.
        sequence = self.cache.begin(request, self.cache.find(request))
        slot = self.pool.acquire(place, sequence, sampler, transcript, now)
        self._outbox.add(Started(request, resumed=request.has_started))
        # Interrupted between its last token and its end, or nothing to say at all.
        if not request.embed and (reason := slot.finish_reason):
            self._end(slot, now, reason)

    def _let_go(self, now: float) -> None:
        """Hand back what was displaced and has found no room since; another worker may have some."""
        for place in self.waiting.places:
            if place.displaced_at is not None and now - place.displaced_at > self._pause_s:
                self._leave_line(place)
                self._outbox.add(HandedBack(place.request))

    def _transcript(self, request: Request) -> Transcript:
        return transcript_of(self.backend.vocab, request.stop, request.format, request.generated)

    def _plan(self, now: float) -> tuple[list[SlotView], BatchPlan]:
        """What this tick computes: the strategy's plan, with room for it in the KV cache.

        What is kept for reuse goes first. If that is not enough, one request at a time pauses, the least urgent and
        youngest, so there are no more tries than slots.
        """
        while True:
            views = views_of(self.pool, self.cache, self._chunk_size, whole=self.backend.info.n_embd is not None)
            plan = self._strategy.plan(views, self.backend.info.n_batch) if views else BatchPlan()
            if not plan.items or self.cache.make_room(plan.tokens):
                return views, self._in_order(plan)
            self._pause_one(now)

    def _in_order(self, plan: BatchPlan) -> BatchPlan:
        """The same plan by sequence: llama.cpp sees neighbours only where they follow each other (`line_up`)."""
        seq_ids = {slot.index: slot.sequence.seq_id for slot in self.pool.active if slot.sequence is not None}
        return BatchPlan(tuple(sorted(plan.items, key=lambda item: seq_ids[item.slot])))

    def _compute(self, views: Sequence[SlotView], plan: BatchPlan) -> None:
        """One forward pass, and what follows from it."""
        slots = self.pool.slots
        items = [
            BatchItem(seq.seq_id, seq.n_past, seq.tokens[seq.n_past : seq.n_past + i.tokens], i.wants_logits)
            for i in plan.items
            if (seq := slots[i.slot].sequence) is not None
        ]
        began = self._clock()
        outcome = self.backend.decode(items)
        if outcome is DecodeOutcome.NO_ROOM and self.cache.evict_all():
            outcome = self.backend.decode(items)
        now = self._clock()
        if outcome is DecodeOutcome.DONE:
            self._computed(plan, now, (now - began) * 1000)
            if self._observe is not None:
                self._observe(plan, views, (now - began) * 1000)
            self._take_results(plan, now)
        elif outcome is DecodeOutcome.NO_ROOM:
            self._pause_one(now)
        else:
            for item in plan.items:
                self._break(slots[item.slot], DecodeFailed("llama.cpp failed the forward pass"))

    def _computed(self, plan: BatchPlan, now: float, eval_ms: float) -> None:
        decode = prefill = 0
        for item in plan.items:
            slot = self.pool.slots[item.slot]
            assert slot.sequence is not None and slot.request is not None
            if slot.remaining == 1 and slot.generated:
                decode += 1
            else:
                prefill += item.tokens
            self.cache.computed(slot.sequence, item.tokens)
            if slot.is_prefilling and now - slot.told_at >= PROGRESS_S:
                slot.told_at = now
                self._outbox.add(Progress(slot.request, slot.n_past, len(slot.tokens)))
            self.served[slot.request.queue] += item.tokens
        self.cache.pay_rent(decode + prefill)
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

    def _must_unify(self) -> bool:
        """Whether a request has outgrown its share of a KV cache that can be made one for all."""
        info = self.backend.info
        return info.can_unify and any(len(slot.tokens) > info.n_ctx_seq for slot in self.pool.active)

    def _unify(self, now: float) -> None:
        """Make one buffer of those of the slots, for good; all requests go on in it from their tokens so far."""
        log.info("a request needs more than its share of the context: from now on all slots share one KV buffer")
        for slot in self.pool.active:
            self._pause(slot, now)
        self.backend.unify()
        self.cache = PrefixCache(self.backend)
        self._admit(now)

    # --- pausing ---

    def _pause_one(self, now: float) -> None:
        """Pause the least urgent and youngest request; one that has the cache to itself can never fit."""
        victim = max(self.pool.active, key=lambda slot: (slot.priority, slot.admitted))
        if len(self.pool.active) > 1:
            self._pause(victim, now)
        else:
            self._break(victim, DecodeFailed("the KV cache has no room for this request alone"))

    def _pause(self, slot: Slot, now: float, *, displaced: bool = False) -> None:
        """Put a request back in line with its tokens so far: the one way back, whatever interrupted it."""
        place, answer = slot.place, tuple(slot.tokens[-slot.generated :]) if slot.generated else ()
        assert place is not None
        used_s, logprobs = slot.used_s(now), tuple(slot.logprobs)
        cached_tokens, prompt_s = slot.cached_tokens, slot.prompt_s
        request = replace(
            self._release(slot),
            generated=answer,
            logged_logprobs=logprobs,
            used_s=used_s,
            cached_tokens=cached_tokens,
            prompt_s=prompt_s,
            has_started=True,
            start_by=None,  # it has been started, so it can no longer come too late
        )
        self._outbox.add(Paused(request, len(answer), "displaced" if displaced else "no_room"))
        self.waiting.put(Place(place.rank, place.came, request, now if displaced else None))

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
                token = next_token(slot, rows[row], row, best, self.backend.vocab, now)
            except Exception as error:
                self._end(slot, now, None, as_ours(error))
                continue
            if token is not None and token.token is not None and slot.sequence is not None:
                self.cache.append(slot.sequence, token.token)
                self._outbox.add(token)
            if reason := "stop" if token is None else slot.finish_reason:
                self._end(slot, now, reason)

    def _embed(self, plan: BatchPlan, now: float) -> None:
        for slot in [self.pool.slots[item.slot] for item in plan.items]:
            try:
                assert slot.sequence is not None
                embedding = unit(self.backend.embedding(slot.sequence.seq_id))
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
        assert transcript is not None
        self._say(*ending(self._release(slot), transcript, stats, reason, error, logprobs, embedding))

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
        if ended.stats.seq_id is not None:
            took_s, before_s = ended.stats.duration_s, self.job_s
            self.job_s = took_s if before_s is None else before_s + NEWEST_WEIGHT * (took_s - before_s)
        outcome = ended.finish_reason or (ended.error.code if ended.error else "unknown")
        done = telemetry.RequestDone.of(self.name, ended.request, ended.stats, outcome)
        telemetry.send(telemetry.request_done, self, done=done)

    def _break(self, slot: Slot, error: SlotlineError) -> None:
        """End a request whose sequence can no longer be trusted."""
        if slot.sequence is not None:
            slot.sequence.shareable = False
        self._end(slot, self._clock(), None, error)

    def _release(self, slot: Slot) -> Request:
        request, sequence = self.pool.release(slot)
        self.cache.end(sequence)
        self._may_admit = True
        return request

    def _on_defect(self, defect: Exception) -> None:
        """Fail the requests in slots, the others go on."""
        for slot in self.pool.active:
            self._break(slot, InternalError(f"{type(defect).__name__}: {defect}"))
        if events := self._outbox.take():
            self._emit(events)

    # --- commands ---

    def _find(self, execution: str) -> Slot | None:
        return next((s for s in self.pool.active if s.request is not None and s.request.execution == execution), None)

    def _cancel(self, execution: str) -> None:
        if slot := self._find(execution):
            self._end(slot, self._clock(), "cancelled")
        elif place := self.waiting.find(execution):
            self._leave_line(place)
            self._refuse(place.request, None, "cancelled")

    def _drop(self, execution: str) -> None:
        if slot := self._find(execution):
            self._release(slot)
        elif place := self.waiting.find(execution):
            self._leave_line(place)

    def _leave_line(self, place: Place) -> None:
        """Take a request out that has not been started; whoever it held up may start now."""
        self.waiting.remove(place)
        self._may_admit = True

    def _hand_back(self, running: bool) -> None:
        now = self._clock()
        for slot in self.pool.active if running else []:
            used_s, prompt_s, generated = slot.used_s(now), slot.prompt_s, slot.generated
            request = self._release(slot)
            self._outbox.add(Paused(request, generated, "drained"))
            self._outbox.add(HandedBack(replace(request, used_s=used_s, prompt_s=prompt_s)))
        for place in self.waiting.places:
            self._leave_line(place)
            self._outbox.add(HandedBack(place.request))

    def check_integrity(self) -> None:
        """Raise AssertionError where slots or cache contradict themselves."""
        self.pool.check_integrity()
        self.cache.check_integrity()
