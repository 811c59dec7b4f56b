"""The pool of slots. A slot is one place to generate in, with one sequence of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from shared.schemas import FinishReason
from worker.backend import TokenSampler
from worker.requests import Logprob, Request, Stats
from worker.text import Transcript


class SlotState(Enum):
    """A slot is free, or works on a request."""

    IDLE = "idle"
    ACTIVE = "active"


@dataclass(slots=True, eq=False)
class Slot:
    """One slot: the request it works on and how far it has come.

    `tokens` is the whole sequence known so far, prompt then answer; the first `n_past` of them are in the KV
    cache. An idle slot may keep tokens in the cache for a later request with the same prefix.
    """

    seq_id: int
    state: SlotState = SlotState.IDLE
    request: Request | None = None
    sampler: TokenSampler | None = None
    transcript: Transcript | None = None
    #: `SamplingParams.is_argmax` of the request, which every tick asks for.
    is_argmax: bool = False
    tokens: list[int] = field(default_factory=list)
    #: Those of the answer's tokens, where the request asks for them.
    logprobs: list[Logprob] = field(default_factory=list)
    n_past: int = 0
    cached_tokens: int = 0
    admitted: int = 0
    admitted_at: float = 0.0
    first_token_at: float | None = None
    last_used_at: float = 0.0

    @property
    def remaining(self) -> int:
        """Tokens known but not yet in the KV cache."""
        return len(self.tokens) - self.n_past

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt) if self.request else 0

    @property
    def is_prefilling(self) -> bool:
        """Whether it works on a prompt (or on the tokens of a resumed request)."""
        return self.state is SlotState.ACTIVE and self.remaining > 1

    @property
    def reserve(self) -> int:
        """KV cells kept for the request as far as it has come; 0 of an idle slot."""
        return self.request.reserve_at(self.generated) if self.request else 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is over as it stands; None if it goes on."""
        request = self.request
        assert request is not None and self.transcript is not None and self.sampler is not None
        if self.transcript.stopped or self.sampler.is_complete:
            return "stop"
        return "length" if len(self.tokens) - len(request.prompt) >= request.max_tokens else None

    def used_s(self, now: float) -> float:
        """Time the request has spent in slots, this one and earlier ones."""
        return now - self.admitted_at + (self.request.used_s if self.request else 0.0)

    def computed(self, count: int) -> None:
        """Note that the next `count` tokens are in the KV cache now."""
        assert 0 < count <= len(self.tokens) - self.n_past, f"{count} of {self.remaining} remaining tokens computed"
        self.n_past += count

    def append(self, token: int, now: float) -> int:
        """Add a token to the answer and return its index."""
        assert len(self.tokens) == self.n_past, "a token was sampled before all earlier ones were computed"
        if self.first_token_at is None:
            self.first_token_at = now
        self.tokens.append(token)
        return self.generated - 1

    def stats(self, now: float) -> Stats:
        """The figures of the request, as of now."""
        assert self.request is not None
        first = self.first_token_at if self.first_token_at is not None else now
        return Stats(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self.generated,
            cached_tokens=self.cached_tokens,
            waited_s=self.request.waited_s,
            prompt_s=first - self.admitted_at,
            generation_s=now - first,
            ttft_s=first - self.admitted_at,
            seq_id=self.seq_id,
        )


class SlotPool:
    """All slots. It alone acquires and releases them."""

    def __init__(self, size: int) -> None:
        self.slots = [Slot(seq_id) for seq_id in range(size)]
        self._admissions = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def active(self) -> list[Slot]:
        """Slots that work, oldest admission first."""
        return sorted((s for s in self.slots if s.state is SlotState.ACTIVE), key=attrgetter("admitted"))

    @property
    def idle(self) -> list[Slot]:
        """Slots that are free."""
        return [s for s in self.slots if s.state is SlotState.IDLE]

    @property
    def reserved(self) -> int:
        """KV cells that the active slots may come to need."""
        return sum(slot.reserve for slot in self.slots)

    def acquire(
        self, slot: Slot, request: Request, sampler: TokenSampler, transcript: Transcript, kept: int, now: float
    ) -> None:
        """Give an idle slot to a request, whose first `kept` tokens its sequence already holds.

        Sampler and transcript are the request's own and know its tokens so far.
        """
        assert slot.state is SlotState.IDLE and slot.request is None, "the slot is in use"
        assert kept <= slot.n_past, "more tokens kept than there are"
        self._admissions += 1
        slot.state, slot.request, slot.sampler = SlotState.ACTIVE, request, sampler
        slot.transcript, slot.logprobs = transcript, list(request.logged_logprobs)
        slot.is_argmax = request.params.is_argmax
        slot.tokens = [*request.prompt, *request.generated]
        slot.n_past, slot.cached_tokens = kept, min(kept, len(request.prompt))
        slot.admitted, slot.admitted_at, slot.first_token_at = self._admissions, now, None

    def release(self, slot: Slot, now: float, keep: bool) -> Request:
        """Free a slot and return its request; `keep` leaves what its sequence holds for a later one."""
        assert slot.state is SlotState.ACTIVE and slot.request is not None, "the slot is not in use"
        request, slot.request = slot.request, None
        if slot.sampler is not None:
            slot.sampler.close()
        slot.state, slot.last_used_at = SlotState.IDLE, now
        slot.sampler, slot.transcript, slot.logprobs = None, None, []
        slot.tokens = slot.tokens[: slot.n_past] if keep else []
        slot.n_past = len(slot.tokens)
        return request

    def check_integrity(self) -> None:
        """Raise AssertionError where the pool contradicts itself."""
        for slot in self.slots:
            assert (slot.state is SlotState.ACTIVE) == (slot.request is not None), f"slot {slot.seq_id}: state"
            assert (slot.state is SlotState.ACTIVE) == (slot.sampler is not None), f"slot {slot.seq_id}: sampler"
            assert (slot.state is SlotState.ACTIVE) == (slot.transcript is not None), f"slot {slot.seq_id}: transcript"
            assert 0 <= slot.n_past <= len(slot.tokens), f"slot {slot.seq_id}: {slot.n_past} of {len(slot.tokens)}"
            if slot.request is not None:
                prompt = slot.request.prompt
                assert tuple(slot.tokens[: len(prompt)]) == prompt, f"slot {slot.seq_id}: prompt changed"
        held = [s.request.id for s in self.slots if s.request is not None]
        assert len(held) == len(set(held)), "one request in two slots"
