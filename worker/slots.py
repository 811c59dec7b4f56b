"""The pool of slots. A slot is one place to generate in, with one sequence of the KV cache while it works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from shared.records import SlotTime
from shared.schemas import FinishReason
from worker.backend import TokenSampler
from worker.black_box import BlackBox
from worker.requests import Logprob, Request, Stats
from worker.sequences import Sequence
from worker.text import Transcript
from worker.waiting import Place


class SlotState(Enum):
    """A slot is free, or works on a request."""

    IDLE = "idle"
    ACTIVE = "active"


@dataclass(slots=True, eq=False)
class Slot:
    """One slot: the request it works on and how far it has come."""

    index: int
    state: SlotState = SlotState.IDLE
    request: Request | None = None
    sequence: Sequence | None = None
    sampler: TokenSampler | None = None
    transcript: Transcript | None = None
    #: Where the request stood in line, and stands again if it is paused.
    place: Place | None = None
    #: `SamplingParams.is_argmax` of the request, which every tick asks for.
    is_argmax: bool = False
    #: Those of the answer's tokens, where the request asks for them.
    logprobs: list[Logprob] = field(default_factory=list)
    cached_tokens: int | None = None
    admitted: int = 0
    admitted_at: float = 0.0
    #: When it last said how much of its prompt is computed, at first when it was admitted.
    told_at: float = 0.0
    #: Time in slots until the first token.
    prompt_s: float | None = None

    @property
    def tokens(self) -> list[int]:
        """The whole sequence known so far, prompt then answer."""
        return self.sequence.tokens if self.sequence else []

    @property
    def n_past(self) -> int:
        """How many of them are in the KV cache."""
        return self.sequence.n_past if self.sequence else 0

    @property
    def remaining(self) -> int:
        """Tokens known but not yet in the KV cache."""
        return self.sequence.remaining if self.sequence else 0

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt) if self.request else 0

    @property
    def is_prefilling(self) -> bool:
        """Whether it works on a prompt (or on the tokens of a resumed request)."""
        return self.state is SlotState.ACTIVE and self.remaining > 1

    @property
    def priority(self) -> int:
        """Of its request; 0 is the most urgent."""
        return self.request.priority if self.request else 0

    @property
    def need(self) -> int:
        """KV cells that the request may come to need beyond those it has, as far as it has come."""
        if self.request is None or self.sequence is None:
            return 0
        return max(0, self.request.reserve_at(self.generated) - max(self.n_past, self.sequence.awaits))

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is over as it stands; None if it goes on."""
        request = self.request
        assert request is not None and self.transcript is not None and self.sampler is not None
        if self.transcript.stopped or self.sampler.is_complete:
            return "stop"
        return "length" if self.generated >= request.max_tokens else None

    def used_s(self, now: float) -> float:
        """Time the request has spent in slots, this one and earlier ones."""
        return now - self.admitted_at + (self.request.used_s if self.request else 0.0)

    def slot_time(self, now: float) -> SlotTime:
        """That time, as it travels with the request's job."""
        return SlotTime(self.used_s(now), self.prompt_s)

    def stats(self, now: float) -> Stats:
        """The figures of the request, as of now."""
        assert self.request is not None and self.sequence is not None
        used_s = self.used_s(now)
        prompt_s = used_s if self.prompt_s is None else self.prompt_s
        return Stats(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self.generated,
            cached_tokens=self.cached_tokens or 0,
            waited_s=self.request.waited_s,
            prompt_s=prompt_s,
            generation_s=used_s - prompt_s,
            ttft_s=prompt_s,
            seq_id=self.sequence.seq_id,
        )


class SlotPool:
    """All slots. It alone acquires and releases them."""

    def __init__(self, size: int, box: BlackBox | None = None) -> None:
        """So many idle slots; what they work on is noted in `box`."""
        self.slots = [Slot(index) for index in range(size)]
        self._box = box or BlackBox()
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

    def acquire(
        self, place: Place, sequence: Sequence, sampler: TokenSampler, transcript: Transcript, now: float
    ) -> Slot:
        """Give an idle slot to the request of a place in line, with the sequence it is to be computed in.

        Sampler and transcript are the request's own and know its tokens so far. There must be an idle slot.
        """
        slot, request = self.idle[0], place.request
        self._box.enter(slot.index, request.execution)
        self._admissions += 1
        slot.state, slot.request, slot.place = SlotState.ACTIVE, request, place
        slot.sequence, slot.sampler, slot.transcript = sequence, sampler, transcript
        slot.logprobs, slot.is_argmax = list(request.logged_logprobs), request.params.is_argmax
        slot.cached_tokens, slot.prompt_s = request.cached_tokens, request.prompt_s
        slot.admitted, slot.admitted_at, slot.told_at = self._admissions, now, now
        return slot

    def release(self, slot: Slot) -> tuple[Request, Sequence]:
        """Free a slot; its request and its sequence, which is the caller's to end."""
        request, sequence = slot.request, slot.sequence
        assert slot.state is SlotState.ACTIVE and request is not None and sequence is not None, "the slot is not in use"
        if slot.sampler is not None:
            slot.sampler.close()
        slot.state, slot.request, slot.sequence, slot.place = SlotState.IDLE, None, None, None
        slot.sampler, slot.transcript, slot.logprobs = None, None, []
        self._box.leave(slot.index)
        return request, sequence

    def check_integrity(self) -> None:
        """Raise AssertionError where the pool contradicts itself."""
        for slot in self.slots:
            is_active = slot.state is SlotState.ACTIVE
            for part in (slot.request, slot.sequence, slot.sampler, slot.transcript, slot.place):
                assert is_active == (part is not None), f"slot {slot.index}: state"
            if slot.request is not None and slot.sequence is not None:
                assert slot.sequence.in_use, f"slot {slot.index} works on a sequence that is not in use"
                prompt = slot.request.prompt
                assert tuple(slot.tokens[: len(prompt)]) == prompt, f"slot {slot.index}: prompt changed"
        held = [s.request.id for s in self.slots if s.request is not None]
        assert len(held) == len(set(held)), "one request in two slots"
        sequences = [s.sequence for s in self.slots if s.sequence is not None]
        assert len(sequences) == len(set(sequences)), "one sequence in two slots"
