"""The sequences in the KV cache of a context: what can be cut off them, and what two of them can share.

llama.cpp answers what it cannot do with False, with a wrong result, or with the end of the process, depending on the
kind of memory. These are its rules as its sources have them.

- **Recurrent and hybrid models** keep the state after a sequence's last token, and none before it
  (`llama_memory_recurrent::seq_rm` refuses; `seq_cp` copies the whole state whatever range it is told).
- **Sliding windows.** Cells that no token of their sequence will look at again are taken for others
  (`llama_kv_cache::find_slot`); removing later tokens does not bring them back, and no call says so. The next token,
  at position `p`, looks at `p - n_swa + 1` and later (`llama_hparams::is_masked_swa`; in chunked attention at the
  beginning of its chunk, which is never earlier). So a sequence may be cut, or shared, up to `p` only while it
  still holds that far back (`llama_memory_seq_pos_min`).
- **Caches apart** (`kv_unified` off): `seq_cp` copies the buffer of a whole sequence, used or not, before the next
  pass (`llama_kv_cache::seq_cp`). What a sequence holds, taken out and put in elsewhere, is less, and there at once;
  but of a sliding window only the window is taken out (`llama_kv_cache::state_write`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from worker.backend import State
from worker.llama_native import ll, quick, slow
from worker.llama_params import keeps_states

_BYTES = ctypes.POINTER(ctypes.c_uint8)


class LlamaMemory:
    """The sequences of one context."""

    def __init__(self, context: Any, model: Any, *, unified: bool) -> None:
        self._context = context
        #: None for a model that keeps nothing between passes: BERT and its kind, made for embeddings.
        self._memory = ll.llama_get_memory(context)
        self._unified = unified
        self._keeps_states = keeps_states(model)
        self._window: int = ll.llama_model_n_swa(model)
        self._remove = quick("llama_memory_seq_rm")
        self._copy = quick("llama_memory_seq_cp")
        self._first = quick("llama_memory_seq_pos_min")
        self._last = quick("llama_memory_seq_pos_max")
        self._state_size = quick("llama_state_seq_get_size")
        self._get_state = slow("llama_state_seq_get_data")
        self._set_state = slow("llama_state_seq_set_data")

    def share(self, source: int, target: int, length: int) -> bool:
        """See `Backend`.

        Raises:
            ValueError: `source` has not as many tokens, or it is `target`.
        """
        if not self._memory:
            return False
        end = self._last(self._memory, source) + 1
        if not 0 < length <= end or source == target:
            raise ValueError(f"{length} tokens of sequence {source} for {target}, where it has {end}")
        if length < end and (self._keeps_states or not self._reaches_back(source, length)):
            return False
        if self._unified:
            # A state is copied whole or not at all.
            self._copy(self._memory, source, target, *((0, length) if length < end else (-1, -1)))
            return True
        if self._window > 0:
            self._copy(self._memory, source, target, -1, -1)
        elif not self.put(target, self.take(source)):
            return False
        return length == end or bool(self._remove(self._memory, target, length, -1))

    @property
    def can_move(self) -> bool:
        """See `ModelInfo`."""
        return bool(self._memory) and not self._unified and self._window <= 0

    def take(self, seq_id: int) -> State:
        """See `Backend`."""
        state = np.empty(self._state_size(self._context, seq_id), np.uint8)
        self._get_state(self._context, state.ctypes.data_as(_BYTES), state.size, seq_id)
        return state

    def put(self, seq_id: int, state: State) -> bool:
        """See `Backend`."""
        return bool(self._set_state(self._context, state.ctypes.data_as(_BYTES), state.size, seq_id))

    def cut(self, seq_id: int, start: int) -> bool:
        """See `Backend`."""
        if not self._memory:
            return False
        if 0 < start <= self._last(self._memory, seq_id) and not self._reaches_back(seq_id, start):
            return False
        return bool(self._remove(self._memory, seq_id, start, -1))

    def clear(self, seq_id: int) -> None:
        """See `Backend`."""
        if self._memory:
            self._remove(self._memory, seq_id, -1, -1)

    def _reaches_back(self, seq_id: int, position: int) -> bool:
        """Whether all is there that a token at this position looks at."""
        if self._window <= 0:
            return True
        return bool(self._first(self._memory, seq_id) <= max(0, position - self._window + 1))
