"""The sampler of the scripted model: every parameter is honoured, of grammars only those of `parse_grammar`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shared.errors import BadLogits, GrammarDeadEnd
from worker.backend import SamplingParams
from worker.fake_scripts import SPOKEN, parse_grammar
from worker.token_choice import TokenChooser

if TYPE_CHECKING:
    from worker.fake_backend import FakeBackend


class FakeSampler:
    """The scripted `TokenSampler`."""

    def __init__(self, backend: FakeBackend, params: SamplingParams) -> None:
        self._backend = backend
        self._chooser = TokenChooser(params, backend.vocab.eog if params.ignore_eos else ())
        self._grammar = parse_grammar(params.grammar, params.grammar_root) if params.grammar is not None else None
        self._accepted = 0
        self.closed = False

    def sample(self, row: int, index: int) -> int | None:
        """See `TokenSampler`.

        Raises:
            BadLogits: the row holds no finite logit, or one that is not a number.
        """
        logits = self._chooser.adjust(self._backend.logits()[row])
        if not np.isfinite(logits.max()):
            raise BadLogits("the model computed no finite logit for this job")
        token = self._next_of_grammar() if self._grammar else self._chooser.choose(logits, index)
        if token is not None:
            self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """See `TokenSampler`."""
        self._accepted += 1
        self._chooser.accept(token)

    def close(self) -> None:
        """See `TokenSampler`."""
        self.closed = True

    def _next_of_grammar(self) -> int | None:
        assert self._grammar is not None
        text, dead_end = self._grammar
        if self._accepted < len(text):
            return SPOKEN + text[self._accepted]
        if dead_end:
            raise GrammarDeadEnd("the grammar allows no token here")
        return None
