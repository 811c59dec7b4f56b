"""How one token is chosen from a row of logits. Both backends choose by this, in numpy.

The order is llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature, draw. Plain numpy on the few likely
tokens takes half the time of llama.cpp's own chain, which copies the whole vocabulary first, keeps no native memory,
and takes 64 bits of seed.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import numpy.typing as npt

from worker.backend import SamplingParams, draw_seed

#: Penalties look back this far. Source: `penalty_last_n` of llama.cpp.
PENALTY_WINDOW_TOKENS = 64

_MIN_TEMPERATURE = 1e-6

Row = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating]
Ids = npt.NDArray[np.intp]


class TokenChooser:
    """Chooses the tokens of one request. Where all is equal, the token with the smaller id comes first."""

    def __init__(self, params: SamplingParams, eog: frozenset[int]) -> None:
        self._params = params
        self._recent: deque[int] = deque(maxlen=PENALTY_WINDOW_TOKENS)
        self._bias_ids = [token for token, _ in params.logit_bias]
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._forbidden = sorted(eog) if params.ignore_eos else []
        self._changes_row = bool(params.logit_bias or params.ignore_eos or params.has_penalties)
        self._margin = 4.0

    def accept(self, token: int) -> None:
        """Take a token into account for the penalties; once for each token of the answer."""
        self._recent.append(token)

    def adjust(self, row: Row) -> Row:
        """The row with bias, forbidden ends and penalties: a copy, or the row itself if nothing changes."""
        if not self._changes_row:
            return row
        row = row.copy()
        np.add.at(row, self._bias_ids, self._bias)
        if self._params.has_penalties and self._recent:
            self._penalise(row)
        row[self._forbidden] = -np.inf
        return row

    def choose(self, row: Row, index: int) -> int:
        """The token for place `index` of the answer. The adjusted row must hold at least one finite logit."""
        params = self._params
        if params.temperature == 0:
            return int(row.argmax())
        ids, logits = self.largest(row, params.top_k) if params.top_k > 0 else _plausible(row, params)
        logits = logits[: _nucleus(logits, params)] if params.top_p < 1 else logits
        scaled = (logits - logits.max()) / max(params.temperature, _MIN_TEMPERATURE)
        weights = np.exp(scaled, dtype=np.float64)
        if params.min_p > 0:
            weights[logits < logits.max() + np.log(params.min_p)] = 0
        return int(ids[_draw(weights, draw_seed(params.seed, index))])

    def largest(self, row: Row, k: int) -> tuple[Ids, Row]:
        """The k most likely tokens and their logits, sorted; fewer where fewer are possible.

        Instead of sorting the vocabulary it sorts what lies within a margin of the largest logit; the margin follows
        from row to row what the model does and has no influence on the result.
        """
        k = min(k, len(row))
        top = row.max()
        ids = np.flatnonzero(row >= top - self._margin)
        while len(ids) < k and self._margin < 1e4:
            self._margin *= 1.5
            ids = np.flatnonzero(row >= top - self._margin)
        if len(ids) > 8 * k:
            self._margin *= 0.9
        logits = row[ids]
        order = np.argsort(-logits, kind="stable")[:k]
        return ids[order], logits[order]

    def _penalise(self, row: Row) -> None:
        params, counts = self._params, Counter(self._recent)
        ids = np.fromiter(counts.keys(), np.intp, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        logits = row[ids]
        logits = np.where(logits <= 0, logits * params.repeat_penalty, logits / params.repeat_penalty)
        row[ids] = logits - times * params.frequency_penalty - params.presence_penalty


def _plausible(row: Row, params: SamplingParams) -> tuple[Ids, Row]:
    """Every token that can be drawn, sorted where top-p will ask for it."""
    floor = np.log(params.min_p) if params.min_p > 0 and params.top_p == 1 else -np.inf
    ids = np.flatnonzero(row >= max(row.max() + floor, np.finfo(np.float32).min))
    logits = row[ids]
    if params.top_p == 1:
        return ids, logits
    order = np.argsort(-logits, kind="stable")
    return ids[order], logits[order]


def _nucleus(logits: Row, params: SamplingParams) -> int:
    """How many of the sorted tokens make up `top_p` of the probability; the one that reaches it belongs to them."""
    sums = np.exp(logits - logits[0], dtype=np.float64).cumsum()
    return int(np.searchsorted(sums, params.top_p * sums[-1])) + 1


def _draw(weights: npt.NDArray[np.float64], bits: int) -> int:
    """A place drawn in proportion to the weights, never one of weight 0."""
    sums = weights.cumsum()
    place = int(np.searchsorted(sums, (bits >> 11) / 2**53 * sums[-1], side="right"))
    return place if place < len(sums) else int(weights.argmax())
