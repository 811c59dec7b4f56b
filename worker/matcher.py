"""Following an answer through a constraint: which tokens may come next, and whether the answer is whole.

The work is llguidance's, whose parser tests one token in 3 µs and a vocabulary of 49,000 tokens in 0.1 ms.
A constraint is compiled once, by the intake thread; a sampler gets a copy, which takes 10 µs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import GrammarDeadEnd, UnsupportedSchema
from worker.token_choice import Row

#: Compiled constraints that are kept for one vocabulary; each takes from 0.1 MB to 50 MB.
MAX_COMPILED = 32

#: In the units of llguidance. To compile takes at most about a second, a mask 15 ms, a lexer 50 MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=100_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class Spelling:
    """A vocabulary in the form in which llguidance takes one.

    Attributes:
        tokens: what each token adds to an answer, or for a special one its name.
        special_token_ids: the tokens that are no text. They are allowed only where a constraint names them.
        eog: the tokens that end an answer.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokens: Sequence[bytes], special: Iterable[int], eog: Iterable[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eog = sorted(eog)
        self.eos_token_id = next(iter(self.eog), None)


class Matcher:
    """How far one answer has got in a constraint."""

    def __init__(self, matcher: LLMatcher, eog: frozenset[int], n_tokens: int) -> None:
        self._matcher = matcher
        self._eog = eog
        self._n_tokens = n_tokens
        self._bits = np.zeros((n_tokens + 31) // 32, np.uint32)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come but an end."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def allows(self, token: int) -> bool:
        """Whether the token may come next; an end token may where the answer may end.

        Raises:
            GrammarDeadEnd: the constraint has become too complex.
        """
        if token in self._eog:
            return self.is_accepting
        allowed = not self.is_complete and self._matcher.validate_tokens([token]) == 1
        self._check()
        return allowed

    def masked(self, logits: Row, count: int | None = None) -> Row:
        """The row with -inf for what may not come next. All of it is right, so `count` does not matter.

        Raises:
            GrammarDeadEnd: the constraint has become too complex.
        """
        return np.where(self.mask(), logits, np.float32(-np.inf))

    def mask(self) -> npt.NDArray[np.bool_]:
        """For each token whether it may come next.

        Raises:
            GrammarDeadEnd: the constraint has become too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8), count=self._n_tokens, bitorder="little").view(np.bool_)

    def take(self, token: int) -> bool:
        """Go on by one token if it is allowed. Returns whether it was; if not, nothing has changed.

        Raises:
            GrammarDeadEnd: the constraint has become too complex.
        """
        if token in self._eog:
            return self.is_accepting
        # Of a token that is refused, `consume_token` would leave the matcher unusable.
        taken = 0 <= token < self._n_tokens and self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def accept(self, token: int) -> None:
        """Go on by one token.

        Raises:
            GrammarDeadEnd: the token is not allowed here.
        """
        if not self.take(token):
            raise GrammarDeadEnd("the answer so far does not fit what it is constrained to")

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            if reason.startswith("NoExtension"):
                raise GrammarDeadEnd("the constraint allows no token here")
            raise GrammarDeadEnd(f"the constraint has become too complex: {reason}")


class ConstraintCompiler:
    """Compiles constraints for one vocabulary and keeps the last ones. It may be used from any thread.

    Answers to the same constraint share the states of its lexer, and with them the limit on these.
    """

    def __init__(self, spell: Callable[[], Spelling]) -> None:
        self._spell = spell
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._eog: frozenset[int] = frozenset()

    def compile(self, constraint: str) -> LLMatcher:
        """The compiled constraint, which is not to be changed.

        Raises:
            UnsupportedSchema: it does not compile, or not within our limits.
        """
        with self._lock:
            compiled = self._compiled.pop(constraint, None) or self._compile(constraint)
            self._compiled[constraint] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled

    def matcher(self, constraint: str) -> Matcher:
        """The start of an answer. It compiles only what is no longer kept.

        Raises:
            UnsupportedSchema: as in `compile`.
        """
        compiled = self.compile(constraint)
        assert self._tokenizer is not None
        return Matcher(compiled.deep_copy(), self._eog, self._tokenizer.vocab_size)

    def _compile(self, constraint: str) -> LLMatcher:
        if self._tokenizer is None:
            spelling = self._spell()
            if not spelling.eog:
                raise UnsupportedSchema("the model has no token that ends an answer, which a constraint needs")
            slices = LLTokenizer.json_slices()
            self._tokenizer = LLTokenizer(spelling, eos_token=spelling.eog, slices=slices)  # type: ignore[arg-type]
            self._eog = frozenset(spelling.eog)
        compiled = LLMatcher(self._tokenizer, constraint, log_level=0, limits=LIMITS)
        if compiled.is_error():
            raise UnsupportedSchema(f"the constraint does not compile: {_reason(compiled.get_error())}")
        return compiled


@lru_cache(maxsize=256)
def compile_error(constraint: str) -> str:
    """Why a constraint does not compile whatever the vocabulary; empty if it does."""
    return _reason(LLMatcher.validate_grammar(constraint, limits=LIMITS))


def _reason(message: str) -> str:
    """The part of a message of llguidance that is about the constraint, on one line."""
    first, *rest = message.splitlines() or [""]
    detail = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), "")
    return f"{first} {detail}".strip()
