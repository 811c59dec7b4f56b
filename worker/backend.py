"""What the engine needs of a model: a vocabulary, forward passes over sequences, and samplers.

`LlamaBackend` (`worker/llama_backend.py`) is the real one and alone touches ctypes; `FakeBackend`
(`worker/fake_backend.py`) is scripted. Apart from `Vocabulary`, everything here belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

#: float32, one row for each batch item that wants logits, one column for each token of the vocabulary.
#: What a sequence holds, outside the KV cache.
State = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

#: Below this a slot has no room for any sensible request.
MIN_TOKENS_PER_SLOT = 32

_MASK_64 = 2**64 - 1


class ModelError(Exception):
    """The model cannot be loaded as configured. The message is one line and says what to do."""


class DecodeOutcome(Enum):
    """What one forward pass came to. Source of the codes: the comment of `llama_decode` in llama.h."""

    DONE = "done"
    NO_ROOM = "no room in the KV cache; nothing has changed"
    ABORTED = "aborted; the sequences of the batch may hold part of it"
    FAILED = "failed; the sequences of the batch may hold part of it"


@dataclass(frozen=True, slots=True)
class BatchItem:
    """Tokens of one sequence to compute in one pass.

    `position` is where the first of them stands in the sequence. Logits are computed for the last token only,
    and only if wanted.
    """

    seq_id: int
    position: int
    tokens: Sequence[int]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is. Byte counts are of this process' own allocations."""

    description: str
    device: str
    layers: int
    layers_offloaded: int
    n_ctx: int
    n_ctx_train: int
    n_ctx_seq: int
    n_batch: int
    n_seq_max: int
    kv_bytes: int
    model_bytes: int
    chat_template: str | None
    warning: str | None = None
    #: Numbers in an embedding; None where the backend was not loaded for embeddings.
    n_embd: int | None = None
    #: Requests that it was loaded to generate at once: `n_seq_max` less the sequences kept for their prefixes.
    n_parallel: int = 1
    #: Whether all sequences share one buffer, so that one may use the whole context and prefixes are shared.
    kv_unified: bool = True
    #: Whether sequences have a buffer each, and what they hold can be taken out and put in elsewhere (`Backend.take`).
    can_move: bool = False
    #: Sequences that are kept for their prefix outside the KV cache, at most.
    n_parked: int = 0
    #: Whether the caches can be made one, so that one request may use the whole context (`Backend.unify`).
    can_unify: bool = False

    @property
    def max_request_tokens(self) -> int:
        """Most tokens one request may use, prompt and answer together."""
        return min(self.room, self.n_ctx_train)

    @property
    def room(self) -> int:
        """Most tokens that the KV cache has room for in one sequence."""
        return self.n_ctx if self.can_unify else self.n_ctx_seq


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, with every default resolved. A temperature of 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    grammar_root: str = "root"
    #: A grammar of llguidance, as text: what the answer has to be, made from a JSON schema or from tools.
    constraint: str | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar of either kind says which tokens may come."""
        return self.grammar is not None or self.constraint is not None

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_argmax(self) -> bool:
        """Whether the token is simply the one with the largest logit (`ignore_eos` aside)."""
        return not (self.temperature or self.logit_bias or self.has_penalties or self.is_constrained)


class Vocabulary(Protocol):
    """Text to tokens and back. Its methods may be called from any thread."""

    n_tokens: int
    bos: int | None
    adds_bos: bool
    eos: int | None
    #: What the model wants at the end of a text of its own, such as BERT's `[SEP]`; None for most.
    closing: int | None
    eog: frozenset[int]

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Tokens of a text, without any start token added.

        Args:
            parse_special: whether the text of a control token becomes that token.
        """
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; empty for control tokens."""
        ...

    def token_text(self, token: int) -> str:
        """How the vocabulary spells a token, control tokens included, such as `<|im_end|>`."""
        ...

    def control_texts(self) -> frozenset[str]:
        """The spellings of all control tokens."""
        ...

    def check_grammar(self, grammar: str, root: str) -> None:
        """Return if the grammar compiles.

        Raises:
            InvalidGrammar: it does not, or is beyond our limits.
        """
        ...

    def check_constraint(self, constraint: str) -> None:
        """Compile a constraint (`SamplingParams.constraint`), so that a sampler finds it compiled.

        Raises:
            UnsupportedSchema: it cannot be enforced, or is beyond our limits.
        """
        ...


class TokenSampler(Protocol):
    """Chooses the tokens of one request. It is fed every token of the answer in order.

    The random draw depends on (seed, token index) alone. Source: the house rule on determinism.
    """

    def sample(self, row: int, index: int) -> int | None:
        """The next token, from row `row` of the last pass, for place `index` of the answer; it is also accepted.

        Returns None where the grammar is complete and allows nothing more.

        Raises:
            GrammarDeadEnd: the grammar is not complete and allows no token.
        """
        ...

    def accept(self, token: int) -> None:
        """Feed a token that was chosen earlier (a resumed request)."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole: its grammar allows nothing more but the end."""
        ...

    def close(self) -> None:
        """Free what belongs to the sampler; a second call does nothing."""
        ...


class Backend(Protocol):
    """A loaded model and its KV cache, used by one thread."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        ...

    @property
    def vocab(self) -> Vocabulary:
        """Its vocabulary."""
        ...

    def decode(self, items: Sequence[BatchItem]) -> DecodeOutcome:
        """One forward pass over all items.

        Raises:
            ValueError: more tokens than `info.n_batch`, a sequence beyond `info.n_seq_max`, or nothing at all.
        """
        ...

    def logits(self) -> Logits:
        """Rows of the last pass in the order of the items that wanted them.

        A view, valid until the next pass; writing to it changes what samplers see.
        """
        ...

    def embedding(self, seq_id: int) -> Logits:
        """The pooled embedding of a sequence that was computed whole in the last pass: float32, `info.n_embd` long."""
        ...

    def new_sampler(self, params: SamplingParams) -> TokenSampler:
        """A sampler for one request.

        Raises:
            InvalidGrammar: the grammar does not compile.
        """
        ...

    def share(self, source: int, target: int, length: int) -> bool:
        """Let `target`, an empty sequence, begin with the first `length` tokens of `source`, which stays as it is.

        `source` may be in the middle of its own work, and may be removed afterwards. In a unified cache the tokens
        are in both sequences without being copied. Returns False where the model or the cache has no way to do it;
        nothing has changed then.
        """
        ...

    def take(self, seq_id: int) -> State:
        """A copy of what a sequence holds, which must not be nothing. Only where `info.can_move`."""
        ...

    def put(self, seq_id: int, state: State) -> bool:
        """Let an empty sequence hold what was taken from any; exactly so. Returns False if that failed."""
        ...

    def unify(self) -> None:
        """Let all sequences share one buffer from now on, and all be empty. Only where `info.can_unify`.

        Raises:
            ModelError: that failed, and nothing works any more.
        """
        ...

    def cut(self, seq_id: int, start: int) -> bool:
        """Remove a sequence's tokens from position `start` on.

        Returns False where the model cannot cut a sequence there (recurrent, hybrid, sliding window); nothing
        has changed then.
        """
        ...

    def clear(self, seq_id: int) -> None:
        """Remove a sequence whole."""
        ...

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        ...


def draw_seed(seed: int, index: int) -> int:
    """64 bits that depend on (seed, token index) alone, for the random draw of one token.

    Source: the splitmix64 generator (Steele, Lea and Flood, 2014), whose state after `index` steps is known
    without taking them.
    """
    bits = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return bits ^ (bits >> 31)


def check_context(n_ctx: int, n_parallel: int) -> None:
    """Return if the context leaves each slot some room.

    Raises:
        ModelError: it does not.
    """
    if n_ctx < n_parallel * MIN_TOKENS_PER_SLOT:
        needed = n_parallel * MIN_TOKENS_PER_SLOT
        raise ModelError(
            f"n_ctx {n_ctx} is too small for {n_parallel} slots; set it to {needed} or more, or lower n_parallel"
        )


def check_batch(items: Sequence[BatchItem], info: ModelInfo) -> None:
    """Return if a pass over the items is possible.

    Raises:
        ValueError: more tokens than `n_batch`, a sequence beyond `n_seq_max`, or nothing at all.
    """
    total = sum(len(item.tokens) for item in items)
    if not 0 < total <= info.n_batch:
        raise ValueError(f"a batch of {total} tokens, where 1 to {info.n_batch} are possible")
    for item in items:
        if not 0 <= item.seq_id < info.n_seq_max:
            raise ValueError(f"sequence {item.seq_id}, where there are {info.n_seq_max}")
        if not item.tokens:
            raise ValueError(f"no tokens for sequence {item.seq_id}")
