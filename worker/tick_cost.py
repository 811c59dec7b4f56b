"""What a forward pass costs on this machine, learnt from the last ones."""

from __future__ import annotations

#: Reading the weights of a model takes about as long as computing this many tokens: a first guess, which the first
#: passes mend.
_FIXED_TOKENS = 8

#: How much of an unexpected cost is believed at once. The rest follows if it lasts.
_GAIN = 0.5

#: A clock may not have moved during a pass; every cost stays above 0.
_LEAST_MS = 1e-3


class TickCost:
    """Estimates the milliseconds of a pass: a fixed part, so much for each decode token and each prefill token.

    A pass that takes less than half or more than twice of what was expected tells nothing unless the next of its kind
    does so too: the machine was busy with something else for once.
    """

    def __init__(self) -> None:
        #: Milliseconds of any pass, of a decode token, of a prefill token; empty before anything was measured.
        self._costs: tuple[float, ...] = ()
        #: Whether the last pass without and the last pass with prefill was far from what was expected.
        self._was_odd = [False, False]

    def of(self, decode: int, prefill: int) -> float:
        """Milliseconds that a pass over so many tokens takes; 0 before anything was measured."""
        return sum(self._parts(decode, prefill))

    def prefill_within(self, ms: float, decode: int) -> int:
        """How many prefill tokens fit into a pass of `ms` milliseconds beside the decode tokens.

        None do before anything was measured.
        """
        return max(0, int((ms - self.of(decode, 0)) / self._costs[2])) if self._costs else 0

    def learn(self, decode: int, prefill: int, ms: float) -> None:
        """Take in a pass over so many tokens that took `ms` milliseconds."""
        ms = max(ms, _LEAST_MS)
        if not self._costs:
            each = ms / (_FIXED_TOKENS + decode + prefill)
            self._costs = (_FIXED_TOKENS * each, each, each)
            return
        parts = self._parts(decode, prefill)
        expected = sum(parts)
        kind = prefill > 0
        is_odd, was_odd = not expected / 2 <= ms <= expected * 2, self._was_odd[kind]
        self._was_odd[kind] = is_odd
        if is_odd and not was_odd:
            return
        # The larger its part in the pass, the more of the error a cost takes, so what a pass has little of is hardly
        # touched. With three parts, and an error of at most what was expected, none changes by more than 70 %.
        # Source: normalised least mean squares, each input scaled by its present estimate.
        step = _GAIN * min(ms - expected, expected) / sum(part * part for part in parts)
        self._costs = tuple(cost * (1 + step * part) for cost, part in zip(self._costs, parts, strict=True))

    def _parts(self, decode: int, prefill: int) -> list[float]:
        return [cost * count for cost, count in zip(self._costs, (1, decode, prefill), strict=False)]
