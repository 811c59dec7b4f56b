"""Choosing tokens: the argmax of all rows at once, and the plain greedy sampler built on it.

Everything else about sampling (chains, grammar, the draw) is the backend's own `TokenSampler`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from worker.backend import Backend, Logits, SamplingParams, TokenSampler


def best_of_rows(logits: Logits) -> list[int | None]:
    """The token with the largest logit in each row; None where that logit is not finite.

    `argmax` stops at a NaN, and a row that is all -inf has -inf as its largest, so this one pass over the
    numbers also finds rows that cannot be sampled from.
    """
    best = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(best)), best])
    return [token if ok else None for token, ok in zip(best.tolist(), finite.tolist(), strict=True)]


class Argmax:
    """The sampler of a greedy request: always the most likely token, never an end token under `ignore_eos`."""

    #: Only an end token ends the answer.
    is_complete = False

    def __init__(self, logits: Callable[[], Logits], eog: frozenset[int], ignore_eos: bool) -> None:
        self._logits = logits
        self._masked = sorted(eog) if ignore_eos else []

    def sample(self, row: int, index: int) -> int:
        """The most likely token of a row."""
        logits = self._logits()[row]
        if self._masked:
            logits[self._masked] = -np.inf
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        """Earlier tokens change nothing."""

    def close(self) -> None:
        """There is nothing to free."""


def make_sampler(backend: Backend, params: SamplingParams) -> TokenSampler:
    """The cheapest sampler that does what `params` ask for."""
    if params.is_argmax:
        return Argmax(backend.logits, backend.vocab.eog, params.ignore_eos)
    return backend.new_sampler(params)
