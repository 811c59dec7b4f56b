"""The sampler of the scripted model: every parameter is honoured, of grammars only those of `parse_grammar`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shared.errors import BadLogits, GrammarDeadEnd
from worker.backend import SamplingParams
from worker.fake_scripts import N_TOKENS, SPOKEN, parse_grammar
from worker.matcher import Matcher
from worker.token_choice import Row, TokenChooser

if TYPE_CHECKING:
    from worker.fake_backend import FakeBackend

#: Added where a constraint refuses the script's token: what closes comes first, and what begins something last, so
#: that JSON ends soon.
_CLOSING = np.zeros(N_TOKENS, np.float32)
_CLOSING[[SPOKEN + byte for byte in b'}]"']] = (13, 12, 11)
_CLOSING[[SPOKEN + byte for byte in b" \t\r\n\\-"]] = -1

#: Allowed within strings only.
_TILDE = SPOKEN + ord("~")
_QUOTE = SPOKEN + ord('"')


class FakeSampler:
    """The scripted `TokenSampler`."""

    def __init__(self, backend: FakeBackend, params: SamplingParams) -> None:
        self._backend = backend
        self._chooser = TokenChooser(params, backend.vocab.eog if params.ignore_eos else ())
        self._grammar = parse_grammar(params.grammar, params.grammar_root) if params.grammar is not None else None
        constraint = params.constraint
        self._matcher = backend.vocab.constraints.matcher(constraint) if constraint is not None else None
        self._accepted = 0
        self.closed = False

    @property
    def is_complete(self) -> bool:
        """See `TokenSampler`."""
        if self._matcher is not None:
            return self._matcher.is_complete
        return self._grammar is not None and self._grammar == (self._grammar[0][: self._accepted], False)

    def sample(self, row: int, index: int) -> int | None:
        """See `TokenSampler`.

        Raises:
            BadLogits: the row holds no finite logit, or one that is not a number.
        """
        logits = self._chooser.adjust(self._backend.logits()[row])
        if not np.isfinite(logits.max()):
            raise BadLogits("the model computed no finite logit for this job")
        token = self._choose(logits, index)
        if token is not None:
            self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """See `TokenSampler`."""
        if self._matcher is not None:
            self._matcher.accept(token)
        self._accepted += 1
        self._chooser.accept(token)

    def close(self) -> None:
        """See `TokenSampler`."""
        self.closed = True

    def _choose(self, logits: Row, index: int) -> int | None:
        if self._grammar is not None:
            return self._next_of_grammar(*self._grammar)
        token = self._chooser.choose(logits, index)
        if self._matcher is None or self._matcher.allows(token):
            return token
        return self._choose_allowed(self._matcher, logits, index)

    def _choose_allowed(self, matcher: Matcher, logits: Row, index: int) -> int | None:
        if matcher.is_complete:
            return None
        masked = matcher.masked(logits + _CLOSING)
        if np.isfinite(masked[_TILDE]):
            masked[_QUOTE] += 10
        if np.isfinite(masked.max()):
            return self._chooser.choose(masked, index)
        if matcher.is_accepting:
            return None
        raise GrammarDeadEnd("the constraint allows no token of the vocabulary here")

    def _next_of_grammar(self, text: bytes, dead_end: bool) -> int | None:
        if self._accepted < len(text):
            return SPOKEN + text[self._accepted]
        if dead_end:
            raise GrammarDeadEnd("the grammar allows no token here")
        return None
