"""How fast a model is with so many jobs at once: the measuring of `slotline tune`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.settings import WorkerSettings
from worker.backend import Backend, BatchItem, DecodeOutcome, ModelError
from worker.model_process import load_backend
from worker.sizing import own_context

#: What is measured, one after the other.
SLOTS = (1, 2, 4, 8, 16, 32, 64)

#: Each slot holds so many tokens, at most, while it is measured: a prompt and half an answer of usual length.
DEPTH = 128
#: On a slow model it holds less, so that filling the slots takes no more than this share of the time.
FILLING_SHARE = 0.4
#: The least that is worth while.
MIN_DEPTH = 16
#: Each slot has room for so many tokens beyond that; and a context that is given, for so many in each slot.
MIN_TICKS, MIN_ROOM = 16, 64

#: With so much of the most tokens per second, fewer slots are better: each job is served faster.
NEARLY = 0.95

Clock = Callable[[], float]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """So many slots that decode: tokens per second of all, and the time from one token of each to its next."""

    slots: int
    tok_s: float
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class Findings:
    """What was measured, at `depth` tokens in each slot, and the sizes to serve the model with."""

    prefill_tok_s: float
    depth: int
    points: list[Point]
    best: Point
    n_ctx: int


def measure(settings: WorkerSettings, seconds: float, say: Say, clock: Clock = time.perf_counter) -> Findings:
    """Measure prefill, then decode with more and more slots, then with fewer and fewer until the time is over.

    Loading the model comes on top of `seconds`. What is not reached in that time is left out, but for one slot.

    Raises:
        ModelError: the model cannot be loaded, or a pass failed.
    """
    if settings.n_ctx:
        bounds = [SLOTS[-1], settings.n_ctx // MIN_ROOM, *([settings.n_batch] if settings.n_batch else [])]
        settings = settings.model_copy(update={"n_parallel": max(1, min(bounds))})
    backend = load_backend(settings, most_slots=SLOTS[-1])
    try:
        return _measure(backend, settings, seconds, say, clock)
    finally:
        backend.close()


def choose(points: Sequence[Point], limit_ms: float) -> Point:
    """The fewest slots with nearly the most tokens per second, among those that keep the time between two tokens.

    That time is `limit_ms`, or twice what one slot takes where that is longer.
    """
    limit_ms = max(limit_ms, 2 * points[0].ms_per_token)
    kept = [point for point in points if point.ms_per_token <= limit_ms]
    most = max(point.tok_s for point in kept)
    return next(point for point in kept if point.tok_s >= NEARLY * most)


@dataclass(slots=True)
class Filled:
    """Sequences of a backend that hold something and are decoded together.

    Attributes:
        chunk_size: the most tokens of one pass that fills them.
        lengths: tokens of each.
    """

    backend: Backend
    chunk_size: int
    lengths: list[int] = field(default_factory=list)

    def fill(self, count: int, depth: int) -> None:
        """See to it that there are exactly `count`, with `depth` tokens each where they can be cut to that."""
        for seq_id in range(count, len(self.lengths)):
            self.backend.clear(seq_id)
        del self.lengths[count:]
        for seq_id, length in enumerate(self.lengths):
            if length > depth and self.backend.cut(seq_id, depth):
                self.lengths[seq_id] = depth
        for seq_id in range(len(self.lengths), count):
            for start in range(0, depth, self.chunk_size):
                end = min(depth, start + self.chunk_size)
                self._pass([BatchItem(seq_id, start, self._tokens(seq_id, start, end), end == depth)])
            self.lengths.append(depth)

    def decode(self) -> None:
        """One tick: a token of each."""
        self._pass([BatchItem(i, n, self._tokens(i, n, n + 1), True) for i, n in enumerate(self.lengths)])
        self.lengths = [length + 1 for length in self.lengths]

    def _tokens(self, seq_id: int, start: int, end: int) -> list[int]:
        return [(1000 + 37 * seq_id + 101 * place) % self.backend.vocab.n_tokens for place in range(start, end)]

    def _pass(self, items: Sequence[BatchItem]) -> None:
        outcome = self.backend.decode(items)
        if outcome is not DecodeOutcome.DONE:
            raise ModelError(f"a pass of {sum(len(item.tokens) for item in items)} tokens: {outcome.value}")


def _measure(backend: Backend, settings: WorkerSettings, seconds: float, say: Say, clock: Clock) -> Findings:
    info = backend.info
    counts = [count for count in SLOTS if count <= info.n_parallel]
    room = min(info.n_ctx_seq, info.n_ctx // counts[-1])
    filled = Filled(backend, min(settings.chunk_size, info.n_batch, info.n_ctx_seq))
    filled.fill(1, MIN_DEPTH)  # the first pass allocates
    deadline = clock() + seconds
    prefill = _prefill_rate(filled, clock, clock() + seconds / 10)
    say(f"prefill: {prefill:.0f} tokens/s")
    in_time = int(FILLING_SHARE * seconds * prefill / counts[-1])
    depth = max(1, min(DEPTH, room - MIN_TICKS, max(MIN_DEPTH, in_time)))
    ticks: dict[int, list[float]] = {}
    # There and back, so that a machine that becomes slower or faster meanwhile favours no number of slots.
    way = [*counts, *reversed(counts)]
    for place, count in enumerate(way):
        if place and clock() > deadline:
            break
        filled.fill(count, depth)
        share = max(0.0, deadline - clock()) / (len(way) - place)
        ticks.setdefault(count, []).extend(_ticks(filled, clock, clock() + share, room))
        if place < len(counts):
            point = _point(count, ticks[count])
            say(f"decode, slots {count}: {point.tok_s:.0f} tokens/s, {point.ms_per_token:.1f} ms per token")
    points = [_point(count, found) for count, found in ticks.items()]
    best = choose(points, settings.itl_target_ms)
    n_ctx = settings.n_ctx or min(info.n_ctx, own_context(info.n_ctx_train, best.slots))
    return Findings(round(prefill, 1), depth, points, best, n_ctx)


def _prefill_rate(filled: Filled, clock: Clock, until: float) -> float:
    """Tokens per second of a prompt that fills a pass; of a shorter one if that alone takes too long."""
    rates: list[float] = []
    size = MIN_DEPTH
    while not rates or clock() < until:
        size = min(size, filled.chunk_size)
        filled.fill(0, 0)
        began = clock()
        filled.fill(1, size)
        took = clock() - began
        if size == filled.chunk_size or clock() + 2 * took > until:
            rates.append(size / took)
        size *= 2
    filled.fill(0, 0)
    return statistics.median(rates)


def _ticks(filled: Filled, clock: Clock, until: float, room: int) -> list[float]:
    """Seconds of each tick after the first, until the time is over or the slots are full; at least of one."""
    found: list[float] = []
    filled.decode()
    while not found or (clock() < until and max(filled.lengths) < room):
        began = clock()
        filled.decode()
        found.append(clock() - began)
    return found


def _point(slots: int, ticks: list[float]) -> Point:
    tick_s = statistics.median(ticks)
    return Point(slots, round(slots / tick_s, 1), round(tick_s * 1000, 2))
