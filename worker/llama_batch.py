"""The arrays of one forward pass, filled through numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from worker.backend import BatchItem
from worker.llama_native import ll


class LlamaBatch:
    """A `llama_batch` whose memory is numpy's. Each token belongs to one sequence.

    Attributes:
        struct: what llama.cpp takes; valid as long as this object.
    """

    def __init__(self, capacity: int, *, all_outputs: bool = False) -> None:
        """Make room for `capacity` tokens; with `all_outputs` every one of them is output, as pooling needs."""
        self._all_outputs = all_outputs
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._counts = np.ones(capacity, np.int32)
        self._seq_ids = np.zeros(capacity, np.int32)
        # llama.cpp wants a pointer to the sequences of each token; these never change, the array behind them does.
        self._pointers = self._seq_ids.ctypes.data + 4 * np.arange(capacity, dtype=np.uintp)
        self._flags = np.zeros(capacity, np.int8)
        self.struct = ll.llama_batch(
            token=_pointer(self._tokens, ll.llama_token),
            pos=_pointer(self._positions, ll.llama_pos),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=_pointer(self._pointers, ctypes.POINTER(ll.llama_seq_id)),
            logits=_pointer(self._flags, ctypes.c_int8),
        )

    def fill(self, items: Sequence[BatchItem]) -> int:
        """Put the items in place of the last ones. Returns how many rows of logits they ask for."""
        tokens: list[int] = []
        positions: list[int] = []
        seq_ids: list[int] = []
        ends: list[int] = []
        for item in items:
            size = len(item.tokens)
            tokens += item.tokens
            positions += range(item.position, item.position + size)
            seq_ids += [item.seq_id] * size
            if item.wants_logits:
                ends.append(len(tokens) - 1)
        total = len(tokens)
        self._tokens[:total] = tokens
        self._positions[:total] = positions
        self._seq_ids[:total] = seq_ids
        self._flags[:total] = self._all_outputs
        self._flags[ends] = 1
        self.struct.n_tokens = total
        return len(ends)


def _pointer(array: np.ndarray[Any, Any], ctype: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctype))
