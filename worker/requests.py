"""What the engine works on (`Request`) and what it says (`Event`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import SlotlineError
from shared.records import SlotTime
from shared.schemas import FinishReason, PauseReason
from worker.answer import AnswerFormat, Delta, ToolCall
from worker.backend import Logits, SamplingParams

#: Tokens a request gets on by, at the least, between two times that the KV cache runs full.
HEADROOM_TOKENS = 32
#: Tokens of answer that room is kept for where a request may generate more. If many do, one of them pauses.
EXPECTED_TOKENS = 256


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
    #: How the answer is taken apart into text, reasoning and tool calls; None where all of it is text.
    format: AnswerFormat | None = None
    #: Give each token's log probability and those of this many likely ones; None for not at all.
    logprobs: int | None = None
    #: Compute the embedding of the prompt; nothing is generated.
    embed: bool = False
    #: Tokens of answer to keep room for. More of them are made while there is room.
    expected_tokens: int = EXPECTED_TOKENS
    #: The log probabilities of `generated`, where `logprobs` asks for them.
    logged_logprobs: tuple[Logprob, ...] = ()
    #: Time it has already spent in slots, of any worker.
    used_s: float = 0.0
    #: Whether it has had a slot before, so that its readers have been told that it started.
    has_started: bool = False
    #: When to give up waiting, on the engine's clock; None for never.
    start_by: float | None = None
    #: Its place in `PRIORITIES`: 0 is the most urgent. Where no slot is free it takes one from a less urgent request.
    priority: int = 1
    #: Its place among those that wait, which age moves forward; None for `priority`.
    rank: int | None = None
    #: The RQ queue it came from. The engine counts by it the tokens that were computed.
    queue: str = ""
    #: Of its first time in a slot: prompt tokens that the KV cache held; None before that.
    cached_tokens: int | None = None
    #: Slot time until its first token; None before that.
    prompt_s: float | None = None

    @property
    def slot_time(self) -> SlotTime:
        """How long it was in slots before it came here."""
        return SlotTime(self.used_s, self.prompt_s)

    @property
    def most_tokens(self) -> int:
        """Tokens it can come to have, prompt and answer together."""
        return len(self.prompt) + (0 if self.embed else self.max_tokens)

    @property
    def reserve(self) -> int:
        """KV cells to have free for it before it starts."""
        return self.reserve_at(len(self.generated))

    def reserve_at(self, generated: int) -> int:
        """KV cells to keep for it once it has `generated` tokens of answer.

        Where fewer tokens are expected than allowed, that is at least room for some more than there are, so that one
        that is let in again gets on before the cache is full the next time.
        """
        return min(self.most_tokens, len(self.prompt) + max(self.expected_tokens, generated + HEADROOM_TOKENS))


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
class Likely:
    """A token's true bytes, or a control token's spelling, and its natural log probability."""

    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """The chosen token, and the most likely ones, most likely first. Before temperature, penalties and bias."""

    chosen: Likely
    top: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a slot. `resumed` says that it is not its first one; earlier tokens are kept."""

    request: Request
    resumed: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of the `total` tokens that the request starts from are computed, and it has taken a while."""

    request: Request
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The request has lost its slot, with so many tokens of answer, and goes on later, here or elsewhere."""

    request: Request
    tokens: int
    reason: PauseReason


@dataclass(frozen=True, slots=True)
class Token:
    """Token `index` of the answer, and the text that became certain with it.

    `token` is None for text that was held back to the very end.
    """

    request: Request
    index: int
    token: int | None
    text: str
    #: What the token adds to reasoning and tool calls; its own `text` is `delta.text` where there is one.
    delta: Delta | None = None
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over and its slot free. `error` is set exactly when it failed."""

    request: Request
    tokens: int
    text: str
    stats: Stats
    finish_reason: FinishReason | None = None
    error: SlotlineError | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None
    embedding: Logits | None = None

    @property
    def slot_time(self) -> SlotTime:
        """How long it was in slots, the last one included."""
        if self.stats.seq_id is None:  # it had none here
            return self.request.slot_time
        return SlotTime(self.stats.duration_s, self.stats.prompt_s if self.stats.generated_tokens else None)


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The request is not over, but not to go on here. It knows its time in slots so far."""

    request: Request


Event = Started | Progress | Paused | Token | Ended | HandedBack


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
