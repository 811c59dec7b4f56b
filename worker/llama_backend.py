"""A model run by llama.cpp, through the low-level interface of llama-cpp-python."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shared.settings import WorkerSettings
from worker.backend import (
    BatchItem,
    DecodeOutcome,
    Logits,
    ModelError,
    ModelInfo,
    SamplingParams,
    State,
    Vocabulary,
    check_batch,
    check_context,
)
from worker.llama_batch import LlamaBatch
from worker.llama_device import device_names, unused_gpu_warning
from worker.llama_memory import LlamaMemory
from worker.llama_native import collected_log, first_error, ll, quick, slow
from worker.llama_params import begins_unified, context_params, keeps_states, model_params, sequences
from worker.llama_sampler import LlamaSampler
from worker.llama_sizing import buffers, look_at
from worker.llama_vocab import LlamaVocab
from worker.model_file import checked_file
from worker.sizing import Sizes, fit, given_sizes

_OUTCOMES = {0: DecodeOutcome.DONE, 1: DecodeOutcome.NO_ROOM, 2: DecodeOutcome.ABORTED}

_OFFLOADED = re.compile(r"\boffloaded (\d+)/\d+ layers")

_LOAD_ADVICE = "download the file again if it is not whole, or upgrade llama-cpp-python if it is newer"
_CONTEXT_ADVICE = "change n_ctx, n_parallel, flash_attn or the cache types"


class LlamaBackend:
    """The `Backend` of llama.cpp. All but `vocab` belongs to one thread.

    Raises:
        ModelError: the model cannot be loaded as configured.
    """

    def __init__(self, settings: WorkerSettings, most_slots: int | None = None) -> None:
        """`most_slots`: no more than that with `n_parallel auto`; left out, as many as are of use."""
        path = checked_file(settings.model_path)
        self._model = self._context = None
        try:
            with collected_log() as log:
                sizes = self._load(path, settings, log, most_slots)
            if not ll.llama_get_memory(self._context) and settings.pooling == "none":
                raise ModelError(f"{path} writes no answers, it only makes embeddings; start it with --pooling mean")
        except BaseException:
            self.close()
            raise
        self._settings, self._sizes = settings, sizes
        self._memory = LlamaMemory(self._context, self._model, unified=self._unified)
        self._vocab = LlamaVocab(ll.llama_model_get_vocab(self._model))
        self.vocab: Vocabulary = self._vocab
        self.info = self._describe([line for _, line in log])
        self._embeds = self.info.n_embd is not None
        self._batch = LlamaBatch(self.info.n_batch, all_outputs=self._embeds)
        self._decode = slow("llama_decode")
        # On a CPU the rows are there when `llama_decode` returns; on a GPU this call waits for them.
        self._get_logits = (slow if self.info.layers_offloaded else quick)("llama_get_logits")
        self._synchronize = slow("llama_synchronize")
        self._rows = np.empty((0, self._vocab.n_tokens), np.float32)

    def decode(self, items: Sequence[BatchItem]) -> DecodeOutcome:
        """See `Backend`. Returns when the logits are there."""
        check_batch(items, self.info)
        if not self._context:
            raise ModelError("the context is gone")
        rows = self._batch.fill(items)
        if rows > self.info.n_seq_max and not self._embeds:  # llama.cpp would abort
            raise ValueError(f"a batch of {rows} rows of logits, where {self.info.n_seq_max} are possible")
        outcome = _OUTCOMES.get(self._decode(self._context, self._batch.struct), DecodeOutcome.FAILED)
        self._rows = self._view(rows if outcome is DecodeOutcome.DONE and not self._embeds else 0)
        return outcome

    def logits(self) -> Logits:
        """See `Backend`."""
        return self._rows

    def embedding(self, seq_id: int) -> Logits:
        """See `Backend`. A copy.

        Raises:
            ValueError: there is none of this sequence.
        """
        numbers = ll.llama_get_embeddings_seq(self._context, seq_id)
        if not numbers:
            raise ValueError(f"the last pass made no embedding of sequence {seq_id}")
        return np.ctypeslib.as_array(numbers, (self.info.n_embd or 0,)).copy()

    def new_sampler(self, params: SamplingParams) -> LlamaSampler:
        """See `Backend`."""
        return LlamaSampler(self.logits, self._vocab, params)

    def share(self, source: int, target: int, length: int) -> bool:
        """See `Backend`."""
        return self._memory.share(source, target, length)

    def take(self, seq_id: int) -> State:
        """See `Backend`."""
        return self._memory.take(seq_id)

    def put(self, seq_id: int, state: State) -> bool:
        """See `Backend`."""
        return self._memory.put(seq_id, state)

    def cut(self, seq_id: int, start: int) -> bool:
        """See `Backend`."""
        return self._memory.cut(seq_id, start)

    def clear(self, seq_id: int) -> None:
        """See `Backend`."""
        self._memory.clear(seq_id)

    def unify(self) -> None:
        """See `Backend`."""
        ll.llama_free(self._context)
        self._context = None
        with collected_log() as log:
            self._make_context(self._settings, self._sizes, log, unified=True)
        self._memory = LlamaMemory(self._context, self._model, unified=True)
        self.info = replace(
            self.info,
            n_ctx_seq=ll.llama_n_ctx_seq(self._context),
            n_seq_max=ll.llama_n_seq_max(self._context),
            kv_unified=True,
            can_move=False,
            n_parked=0,
            can_unify=False,
        )

    def close(self) -> None:
        """See `Backend`."""
        if self._context:
            ll.llama_free(self._context)
        if self._model:
            ll.llama_model_free(self._model)
        self._model = self._context = None

    def _load(self, path: Path, settings: WorkerSettings, log: list[tuple[int, str]], most_slots: int | None) -> Sizes:
        """Load the model, and make a context of the sizes that are asked for or fit."""
        sizes = given_sizes(settings)
        if sizes is not None:
            check_context(sizes.n_ctx, sizes.n_parallel)
        self._model = ll.llama_model_load_from_file(str(path).encode(), model_params(settings))
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {path}: {first_error(log)}; {_LOAD_ADVICE}")
        if sizes is None:
            sizes = fit(settings, look_at(self._model, settings, [line for _, line in log], most_slots))
        on_gpu = _layers_offloaded(line for _, line in log) > 0
        self._make_context(settings, sizes, log, unified=begins_unified(settings, sizes, on_gpu=on_gpu))
        return sizes

    def _make_context(
        self, settings: WorkerSettings, sizes: Sizes, log: list[tuple[int, str]], *, unified: bool
    ) -> None:
        n_seq_max = sequences(settings, self._model, sizes.n_parallel, unified=unified)
        params = context_params(settings, sizes, n_seq_max, unified=unified)
        self._context, self._unified = ll.llama_init_from_model(self._model, params), unified
        if not self._context:
            raise ModelError(f"llama.cpp cannot make a context: {first_error(log)}; {_CONTEXT_ADVICE}")

    def _view(self, rows: int) -> Logits:
        if rows == 0:
            if self.info.layers_offloaded:
                self._synchronize(self._context)
            return self._rows[:0]
        return np.ctypeslib.as_array(self._get_logits(self._context), (rows, self._vocab.n_tokens))

    def _describe(self, log: list[str]) -> ModelInfo:
        settings, sizes, offloaded = self._settings, self._sizes, _layers_offloaded(log)
        can_move = self._memory.can_move
        cache_bytes = sum(size for (kind, _), size in buffers(log).items() if kind in ("KV", "RS", "state"))
        template = ll.llama_model_chat_template(self._model, None)
        return ModelInfo(
            description=_description(self._model),
            device=", ".join(device_names(gpu=offloaded > 0)) or "unknown",
            layers=ll.llama_model_n_layer(self._model),
            layers_offloaded=offloaded,
            n_ctx=ll.llama_n_ctx(self._context),
            n_ctx_train=ll.llama_model_n_ctx_train(self._model),
            n_ctx_seq=ll.llama_n_ctx_seq(self._context),
            n_batch=ll.llama_n_batch(self._context),
            n_seq_max=ll.llama_n_seq_max(self._context),
            kv_bytes=cache_bytes,
            model_bytes=ll.llama_model_size(self._model),
            chat_template=template.decode(errors="replace") if template else None,
            warning=unused_gpu_warning(settings.n_gpu_layers),
            n_embd=None if settings.pooling == "none" else ll.llama_model_n_embd_out(self._model),
            n_parallel=sizes.n_parallel,
            kv_unified=self._unified,
            can_move=can_move,
            n_parked=settings.cached_prefixes if can_move and not keeps_states(self._model) else 0,
            can_unify=settings.kv_unified == "auto" and not self._unified,
        )


def _layers_offloaded(log: Iterable[str]) -> int:
    return max((int(m[1]) for line in log for m in _OFFLOADED.finditer(line)), default=0)


def _description(model: Any) -> str:
    buffer = ctypes.create_string_buffer(128)
    ll.llama_model_desc(model, buffer, 128)
    return buffer.value.decode(errors="replace")
