"""The sampler of one request on a model of llama.cpp: our choice of tokens, llama.cpp's grammars."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import BadLogits, GrammarDeadEnd
from worker.backend import Logits, SamplingParams
from worker.grammar import compile_grammar
from worker.llama_native import ll, quick
from worker.llama_vocab import LlamaVocab
from worker.token_choice import Row, TokenChooser

_accept = quick("llama_sampler_accept")
_apply = quick("llama_sampler_apply")
_free = quick("llama_sampler_free")

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

#: A refused token is first replaced from those this close to the best; the whole vocabulary costs 20 times as much.
_NEAR = 12.0


class LlamaSampler:
    """The `TokenSampler` of llama.cpp."""

    def __init__(self, logits: Callable[[], Logits], vocab: LlamaVocab, params: SamplingParams) -> None:
        self._logits = logits
        self._params = params
        self._eog = sorted(vocab.eog)
        self._chooser = TokenChooser(params, vocab.eog)
        self._grammar = Grammar(vocab, params.grammar, params.grammar_root) if params.grammar is not None else None

    def sample(self, row: int, index: int) -> int | None:
        """See `TokenSampler`.

        Raises:
            BadLogits: the row holds no finite logit, or one that is not a number.
        """
        logits = self._logits()[row]
        if not np.isfinite(logits.max()):
            raise BadLogits("the model computed no finite logit for this job")
        logits = self._chooser.adjust(logits)
        best = self._chooser.choose(logits, index)
        token = best if self._allows(best) else self._choose_allowed(logits, index)
        if token is not None:
            self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """See `TokenSampler`.

        Raises:
            GrammarDeadEnd: the grammar does not allow the token here.
        """
        if self._grammar is not None:
            self._grammar.accept(token)
        self._chooser.accept(token)

    def close(self) -> None:
        """See `TokenSampler`."""
        if self._grammar is not None:
            self._grammar.close()

    def _allows(self, token: int) -> bool:
        return self._grammar is None or self._grammar.allows(token)

    def _choose_allowed(self, logits: Row, index: int) -> int | None:
        """The same draw from what the grammar allows; None if that is only the end."""
        grammar = self._grammar
        assert grammar is not None
        wanted = 1 if self._params.temperature == 0 else self._params.top_k
        near = np.flatnonzero(logits >= logits.max() - _NEAR)
        allowed = near[grammar.mask(near)]
        if not 0 < wanted <= len(allowed):
            everything = np.arange(len(logits))
            allowed = everything[grammar.mask(everything)]
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        if not np.isfinite(np.delete(masked, self._eog).max()):
            if grammar.allows(self._eog[0]):
                return None
            raise GrammarDeadEnd("the grammar allows no token of the vocabulary here")
        return self._chooser.choose(masked, index)


class Grammar:
    """A compiled grammar and how far an answer has got in it."""

    def __init__(self, vocab: LlamaVocab, grammar: str, root: str) -> None:
        self._n_tokens = vocab.n_tokens
        self._sampler = compile_grammar(vocab.handle, grammar, root)
        self._one, self._one_array = _candidates(1)

    def allows(self, token: int) -> bool:
        """Whether the token may come next; an end token may where the grammar is complete."""
        self._one[0] = (token, 0.0, 0.0)
        _apply(self._sampler, self._one_array)
        return bool(np.isfinite(self._one[0]["logit"]))

    def mask(self, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of the tokens may come next."""
        data, array = _candidates(len(tokens))
        data["id"] = tokens
        _apply(self._sampler, array)
        # llama.cpp keeps the order of the candidates.
        allowed: npt.NDArray[np.bool_] = np.isfinite(data["logit"])
        return allowed

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


def _candidates(size: int) -> tuple[npt.NDArray[Any], Any]:
    """An array of candidates and llama.cpp's view of it. The first must be kept as long as the second is used."""
    data = np.zeros(size, _CANDIDATE)
    pointer = ctypes.cast(data.ctypes.data, ll.llama_token_data_p)
    return data, ctypes.byref(ll.llama_token_data_array(data=pointer, size=size, selected=-1, sorted=False))
