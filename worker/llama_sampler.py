"""The sampler of one request on a model of llama.cpp: our choice of tokens, within a grammar or a constraint."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shared.errors import BadLogits, GrammarDeadEnd, InvalidGrammar
from worker.backend import Logits, SamplingParams
from worker.grammar import compile_grammar
from worker.llama_native import ll, quick, slow
from worker.llama_vocab import LlamaVocab
from worker.matcher import Matcher
from worker.token_choice import Ids, Row, TokenChooser, likely

_accept = quick("llama_sampler_accept")
_apply = quick("llama_sampler_apply")
_apply_to_many = slow("llama_sampler_apply")
_free = quick("llama_sampler_free")

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

#: Where a grammar refuses the best token, this many of the most likely ones are tested before all others.
_LIKELY = 128

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
        if isinstance(self._guide, Grammar):
            # For llama.cpp a control token is its text, but that text never becomes part of an answer.
            forbidden |= vocab.control - vocab.eog - self._guide.named
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
        token = best if guide.take(best) else self._choose_allowed(guide, logits, index)
        if token is not None:
            self._chooser.accept(token)
        if time.thread_time() - began > _MAX_STEP_S:
            raise InvalidGrammar("the grammar can be read in too many ways: one token took over a second", "grammar")
        return token

    def _choose_allowed(self, guide: Grammar | Matcher, logits: Row, index: int) -> int | None:
        """The same draw from what is allowed; None if that is only the end."""
        masked = guide.masked(logits, self._chooser.considers)
        if np.isfinite(np.delete(masked, self._eog).max()):
            token = self._chooser.choose(masked, index)
            guide.accept(token)
            return token
        if any(map(guide.allows, self._eog[:1])):
            return None
        raise GrammarDeadEnd("the grammar allows no token of the vocabulary here")


class Grammar:
    """A compiled grammar and how far an answer has got in it."""

    def __init__(self, vocab: LlamaVocab, grammar: str, root: str) -> None:
        self._n_tokens = vocab.n_tokens
        self._eog = np.array(sorted(vocab.eog), np.intp)
        self._tree = vocab.tree
        self._sampler, self.named = compile_grammar(vocab, grammar, root)
        # One of these may come next wherever any token may.
        self._starts = np.append(self._tree.roots, np.array(sorted(self.named - vocab.eog), np.intp))
        self._one = ll.llama_token_data()
        self._one_array = ctypes.byref(_array(ctypes.pointer(self._one), 1))

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come but an end."""
        if not len(self._eog) or not self.allows(self._eog[0]):
            return False
        return len(self.allowed(self._starts)) == 0

    def allows(self, token: int) -> bool:
        """Whether the token may come next; an end token may where the grammar is complete."""
        self._one.id, self._one.logit = token, 0.0
        _apply(self._sampler, self._one_array)
        return bool(self._one.logit == 0.0)

    def allowed(self, tokens: Ids) -> Ids:
        """Those of the tokens that may come next."""
        data = np.zeros(len(tokens), _CANDIDATE)
        data["id"] = tokens
        pointer = ctypes.cast(data.ctypes.data, ll.llama_token_data_p)
        _apply_to_many(self._sampler, ctypes.byref(_array(pointer, len(tokens))))
        # llama.cpp leaves the candidates in their order.
        allowed: Ids = tokens[data["logit"] == 0.0]
        return allowed

    def masked(self, logits: Row, count: int | None) -> Row:
        """The row with -inf for what the grammar refuses.

        Args:
            count: only so many of the most likely tokens have to be right; None for all. To test a vocabulary of
                49,000 tokens one by one would take 7 ms, and those that matter are mostly found in 0.1 ms.
        """
        allowed = self.allowed(likely(logits, _LIKELY))
        if count is None or len(allowed) < count:
            allowed = self._all_allowed()
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def _all_allowed(self) -> Ids:
        if self.named:
            # A token that is allowed by its name need not begin with one that is.
            return self.allowed(np.arange(self._n_tokens))
        return np.append(self._tree.allowed(self.allowed), self.allowed(self._eog))

    def take(self, token: int) -> bool:
        """Go on by one token if it is allowed. Returns whether it was; if not, nothing has changed."""
        # llama.cpp ends the process when it is given a token that the grammar does not allow.
        if not 0 <= token < self._n_tokens or not self.allows(token):
            return False
        _accept(self._sampler, token)
        return True

    def accept(self, token: int) -> None:
        """Go on by one token.

        Raises:
            GrammarDeadEnd: the token is not allowed here.
        """
        if not self.take(token):
            raise GrammarDeadEnd("the answer so far does not fit the grammar")

    def close(self) -> None:
        """Free the grammar; a second call does nothing."""
        if self._sampler is not None:
            _free(self._sampler)
            self._sampler = None


def _guide(vocab: LlamaVocab, params: SamplingParams) -> Grammar | Matcher | None:
    if params.constraint is not None:
        return vocab.constraints.matcher(params.constraint)
    return Grammar(vocab, params.grammar, params.grammar_root) if params.grammar is not None else None


def _array(first: Any, size: int) -> Any:
    """llama.cpp's view of candidates, which must be kept as long as it is used."""
    return ll.llama_token_data_array(data=first, size=size, selected=-1, sorted=False)
