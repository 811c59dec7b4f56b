"""The sampler of one request on a model of llama.cpp: our choice of tokens, within a grammar or a constraint."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import BadLogits, GrammarDeadEnd, InvalidGrammar
from worker.backend import Logits, SamplingParams
from worker.grammar import compile_grammar
from worker.llama_native import ll, quick, slow
from worker.llama_vocab import LlamaVocab
from worker.matcher import Matcher
from worker.token_choice import Row, TokenChooser

_accept = quick("llama_sampler_accept")
_apply = quick("llama_sampler_apply")
_apply_to_many = slow("llama_sampler_apply")
_free = quick("llama_sampler_free")

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

#: Where the grammar refuses the best token, tokens this much less likely than the best allowed one are left out
#: (a natural logarithm: 6 in a million). To test all of a vocabulary takes 7 ms, those near the best much less.
_REACH = 12.0

#: CPU time one token may take in a grammar. What takes so long doubles with each character.
_MAX_STEP_S = 1.0


class LlamaSampler:
    """The `TokenSampler` of llama.cpp."""

    def __init__(self, logits: Callable[[], Logits], vocab: LlamaVocab, params: SamplingParams) -> None:
        self._logits = logits
        self._params = params
        self._eog = sorted(vocab.eog)
        self._guide = _guide(vocab, params)
        forbidden = vocab.eog if params.ignore_eos else frozenset()
        if isinstance(self._guide, Grammar) and not self._guide.names_tokens:
            # For llama.cpp a control token is its text, but that text never becomes part of an answer.
            forbidden |= vocab.control - vocab.eog
        self._chooser = TokenChooser(params, forbidden)

    @property
    def is_complete(self) -> bool:
        """See `TokenSampler`."""
        return self._guide is not None and self._guide.is_complete

    def sample(self, row: int, index: int) -> int | None:
        """See `TokenSampler`.

        Raises:
            BadLogits: the row holds no finite logit, or one that is not a number.
            InvalidGrammar: the grammar takes too long.
        """
        logits = self._chooser.adjust(self._logits()[row])
        if not np.isfinite(logits.max()):
            raise BadLogits("the model computed no finite logit for this job")
        if self._guide is not None:
            return self._sample_in(self._guide, logits, index)
        token = self._chooser.choose(logits, index)
        self._chooser.accept(token)
        return token

    def accept(self, token: int) -> None:
        """See `TokenSampler`.

        Raises:
            GrammarDeadEnd: the grammar does not allow the token here.
        """
        if self._guide is not None:
            self._guide.accept(token)
        self._chooser.accept(token)

    def close(self) -> None:
        """See `TokenSampler`."""
        if isinstance(self._guide, Grammar):
            self._guide.close()

    def _sample_in(self, guide: Grammar | Matcher, logits: Row, index: int) -> int | None:
        began = time.thread_time()
        best = self._chooser.choose(logits, index)
        token = best if guide.allows(best) else self._choose_allowed(guide, logits, index)
        if token is not None:
            self.accept(token)
        if time.thread_time() - began > _MAX_STEP_S:
            raise InvalidGrammar("the grammar can be read in too many ways: one token took over a second", "grammar")
        return token

    def _choose_allowed(self, guide: Grammar | Matcher, logits: Row, index: int) -> int | None:
        """The same draw from what is allowed; None if that is only the end."""
        masked = guide.masked(logits, _REACH * max(1.0, self._params.temperature))
        if np.isfinite(np.delete(masked, self._eog).max()):
            return self._chooser.choose(masked, index)
        if any(map(guide.allows, self._eog[:1])):
            return None
        raise GrammarDeadEnd("the grammar allows no token of the vocabulary here")


class Grammar:
    """A compiled grammar and how far an answer has got in it."""

    def __init__(self, vocab: LlamaVocab, grammar: str, root: str) -> None:
        self._n_tokens = vocab.n_tokens
        self._end = min(vocab.eog, default=None)
        self._sampler, self.names_tokens = compile_grammar(vocab, grammar, root)
        self._openers = vocab.openers
        if self.names_tokens:
            self._openers = np.append(self._openers, sorted(vocab.control - vocab.eog))
        self._one, self._one_array = _candidates(1)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come but an end."""
        if self._end is None or not self.allows(self._end):
            return False
        return len(self.allowed(self._openers)) == 0

    def allows(self, token: int) -> bool:
        """Whether the token may come next; an end token may where the grammar is complete."""
        self._one[0] = (token, 0.0, 0.0)
        _apply(self._sampler, self._one_array)
        return bool(np.isfinite(self._one[0]["logit"]))

    def allowed(self, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Those of the tokens that may come next."""
        data, array = _candidates(len(tokens))
        data["id"] = tokens
        _apply_to_many(self._sampler, array)
        # llama.cpp leaves the candidates in their order.
        allowed: npt.NDArray[np.intp] = tokens[np.isfinite(data["logit"])]
        return allowed

    def masked(self, logits: Row, reach: float) -> Row:
        """The row with -inf for what the grammar refuses, and for what is further than `reach` below the best."""
        floor = logits.max() - reach
        allowed = self.allowed(np.flatnonzero(logits >= floor))
        # Then down to the same reach below the best that is allowed, or through all tokens if none is.
        lower = logits[allowed].max() - reach if len(allowed) else -np.inf
        if lower < floor:
            rest = np.flatnonzero((logits < floor) & (logits >= lower))
            allowed = np.concatenate((allowed, self.allowed(rest)))
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def accept(self, token: int) -> None:
        """Go on by one token.

        llama.cpp ends the process when it is given a token that the grammar does not allow.

        Raises:
            GrammarDeadEnd: the token is not allowed here.
        """
        if not 0 <= token < self._n_tokens or not self.allows(token):
            raise GrammarDeadEnd("the answer so far does not fit the grammar")
        _accept(self._sampler, token)

    def close(self) -> None:
        """Free the grammar; a second call does nothing."""
        if self._sampler is not None:
            _free(self._sampler)
            self._sampler = None


def _guide(vocab: LlamaVocab, params: SamplingParams) -> Grammar | Matcher | None:
    if params.constraint is not None:
        return vocab.constraints.matcher(params.constraint)
    return Grammar(vocab, params.grammar, params.grammar_root) if params.grammar is not None else None


def _candidates(size: int) -> tuple[npt.NDArray[Any], Any]:
    """An array of candidates and llama.cpp's view of it. The first must be kept as long as the second is used."""
    data = np.zeros(size, _CANDIDATE)
    pointer = ctypes.cast(data.ctypes.data, ll.llama_token_data_p)
    return data, ctypes.byref(ll.llama_token_data_array(data=pointer, size=size, selected=-1, sorted=False))
