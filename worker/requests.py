"""What the engine works on (`Request`) and what it says (`Started`, `Token`, `Ended`, `HandedBack`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import SlotlineError
from shared.schemas import FinishReason
from worker.backend import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One generation, ready to be admitted.

    `generated` holds the tokens of the answer that are already in the log; the engine goes on behind them. That
    is the one way back for whatever was interrupted.
    """

    id: str
    execution: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    generated: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    timeout_s: float = 600.0
    cache_prompt: bool = False
    stream: bool = False
    waited_s: float = 0.0
    #: Time it has already spent in slots.
    used_s: float = 0.0
    #: When to give up waiting, on the engine's clock; None for never.
    start_by: float | None = None

    @property
    def reserve(self) -> int:
        """KV cells it may come to need."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Stats:
    """The figures of one ended request; times in seconds."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    waited_s: float
    prompt_s: float
    generation_s: float
    ttft_s: float
    seq_id: int | None

    @property
    def duration_s(self) -> float:
        """Time in a slot."""
        return self.prompt_s + self.generation_s


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a slot. `resumed` says that earlier tokens are kept."""

    request: Request
    resumed: bool


@dataclass(frozen=True, slots=True)
class Token:
    """Token `index` of the answer, and the text that became certain with it.

    `token` is None for text that was held back to the very end.
    """

    request: Request
    index: int
    token: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over and its slot free. `error` is set exactly when it failed."""

    request: Request
    tokens: int
    text: str
    stats: Stats
    finish_reason: FinishReason | None = None
    error: SlotlineError | None = None


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The request is not over, but not to go on here."""

    request: Request


Event = Started | Token | Ended | HandedBack


@dataclass(slots=True)
class Outbox:
    """The events of one tick, in order."""

    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Append one event."""
        self.events.append(event)

    def take(self) -> list[Event]:
        """All events so far, which leaves the box empty."""
        taken, self.events = self.events, []
        return taken
