"""A model run by llama.cpp, through the low-level interface of llama-cpp-python."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
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
    Vocabulary,
    check_batch,
    check_context,
)
from worker.llama_batch import LlamaBatch
from worker.llama_device import device_names, unused_gpu_warning, usable_cores
from worker.llama_native import collected_log, first_error, ll, quick, slow
from worker.llama_sampler import LlamaSampler
from worker.llama_vocab import LlamaVocab
from worker.model_file import checked_file

_OUTCOMES = {0: DecodeOutcome.DONE, 1: DecodeOutcome.NO_ROOM, 2: DecodeOutcome.ABORTED}

_CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_POOLING = {"none": ll.LLAMA_POOLING_TYPE_NONE, "mean": ll.LLAMA_POOLING_TYPE_MEAN}
_POOLING |= {"cls": ll.LLAMA_POOLING_TYPE_CLS, "last": ll.LLAMA_POOLING_TYPE_LAST}
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}

_CACHE_SIZE = re.compile(r"\b(?:KV|RS) buffer size *= *([\d.]+) MiB")
_OFFLOADED = re.compile(r"\boffloaded (\d+)/\d+ layers")

#: Most tokens of a pass for embeddings where `n_batch` is left out. Each of them takes a row of logits too, which
#: nobody reads: 400 MB with a vocabulary of 50,000.
EMBEDDING_BATCH = 2048

_LOAD_ADVICE = "download the file again if it is not whole, or upgrade llama-cpp-python if it is newer"
_CONTEXT_ADVICE = "change n_ctx, n_parallel, flash_attn or the cache types"


class LlamaBackend:
    """The `Backend` of llama.cpp. All but `vocab` belongs to one thread.

    Raises:
        ModelError: the model cannot be loaded as configured.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        path = checked_file(settings.model_path)
        check_context(settings.n_ctx, settings.n_parallel)
        self._model = self._context = None
        with collected_log() as log:
            self._model = ll.llama_model_load_from_file(str(path).encode(), _model_params(settings))
            if not self._model:
                raise ModelError(f"llama.cpp cannot load {path}: {first_error(log)}; {_LOAD_ADVICE}")
            self._context = ll.llama_init_from_model(self._model, _context_params(settings))
            if not self._context:
                self.close()
                raise ModelError(f"llama.cpp cannot make a context: {first_error(log)}; {_CONTEXT_ADVICE}")
        # None for a model that keeps nothing between passes: BERT and its kind, made for embeddings.
        self._memory = ll.llama_get_memory(self._context)
        if not self._memory and settings.pooling == "none":
            self.close()
            raise ModelError(f"{path} writes no answers, it only makes embeddings; start it with --pooling mean")
        self._vocab = LlamaVocab(ll.llama_model_get_vocab(self._model))
        self.vocab: Vocabulary = self._vocab
        self.info = self._describe(settings, [line for _, line in log])
        self._embeds = self.info.n_embd is not None
        self._batch = LlamaBatch(self.info.n_batch, all_outputs=self._embeds)
        self._decode = slow("llama_decode")
        # On a CPU the rows are there when `llama_decode` returns; on a GPU this call waits for them.
        self._get_logits = (slow if self.info.layers_offloaded else quick)("llama_get_logits")
        self._synchronize = slow("llama_synchronize")
        self._cut = quick("llama_memory_seq_rm")
        self._rows = np.empty((0, self._vocab.n_tokens), np.float32)

    def decode(self, items: Sequence[BatchItem]) -> DecodeOutcome:
        """See `Backend`. Returns when the logits are there."""
        check_batch(items, self.info)
        rows = self._batch.fill(items)
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

    def cut(self, seq_id: int, start: int) -> bool:
        """See `Backend`."""
        return bool(self._memory and self._cut(self._memory, seq_id, start, -1))

    def clear(self, seq_id: int) -> None:
        """See `Backend`."""
        if self._memory:
            self._cut(self._memory, seq_id, -1, -1)

    def close(self) -> None:
        """See `Backend`."""
        if self._context:
            ll.llama_free(self._context)
        if self._model:
            ll.llama_model_free(self._model)
        self._model = self._context = None

    def _view(self, rows: int) -> Logits:
        if rows == 0:
            if self.info.layers_offloaded:
                self._synchronize(self._context)
            return self._rows[:0]
        return np.ctypeslib.as_array(self._get_logits(self._context), (rows, self._vocab.n_tokens))

    def _describe(self, settings: WorkerSettings, log: list[str]) -> ModelInfo:
        offloaded = max((int(m[1]) for line in log for m in _OFFLOADED.finditer(line)), default=0)
        cache_mib = sum(float(m[1]) for line in log for m in _CACHE_SIZE.finditer(line))
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
            kv_bytes=round(cache_mib * 2**20),
            model_bytes=ll.llama_model_size(self._model),
            chat_template=template.decode(errors="replace") if template else None,
            warning=unused_gpu_warning(settings.n_gpu_layers),
            n_embd=None if settings.pooling == "none" else ll.llama_model_n_embd_out(self._model),
        )


def _model_params(settings: WorkerSettings) -> Any:
    params = ll.llama_model_default_params()
    params.n_gpu_layers = settings.n_gpu_layers
    params.split_mode = _SPLIT_MODES[settings.split_mode]
    params.main_gpu = settings.main_gpu
    if settings.tensor_split:
        shares = [float(share) for share in settings.tensor_split.split(",")]
        if len(shares) > ll.LLAMA_MAX_DEVICES:
            raise ModelError(f"tensor_split names {len(shares)} devices, and there can be {ll.LLAMA_MAX_DEVICES}")
        params.tensor_split = (ctypes.c_float * ll.LLAMA_MAX_DEVICES)(*shares)
    if settings.use_mlock:
        params.load_mode = ll.LLAMA_LOAD_MODE_MMAP_MLOCK
    return params


def _context_params(settings: WorkerSettings) -> Any:
    params = ll.llama_context_default_params()
    params.n_ctx = settings.n_ctx
    params.n_batch = settings.batch_tokens
    params.n_ubatch = min(settings.n_ubatch, settings.batch_tokens)
    params.n_seq_max = settings.n_parallel
    params.kv_unified = settings.kv_unified
    params.n_threads = params.n_threads_batch = settings.threads or usable_cores()
    params.type_k = _CACHE_TYPES[settings.cache_type_k]
    params.type_v = _CACHE_TYPES[settings.cache_type_v]
    params.flash_attn_type = _FLASH_ATTN[settings.flash_attn]
    params.offload_kqv = True
    params.no_perf = True
    if settings.pooling != "none":
        _make_pooling(params, settings)
    return params


def _make_pooling(params: Any, settings: WorkerSettings) -> None:
    """Pool each sequence of a pass into one embedding, which takes that llama.cpp computes the pass in one piece.

    Source: llama.cpp pools within a micro-batch, and cuts sequences of different lengths up where each has a KV
    buffer of its own (`llama_kv_cache::init_batch`).
    """
    params.embeddings = True
    params.pooling_type = _POOLING[settings.pooling]
    params.n_batch = settings.n_batch or min(settings.n_ctx, EMBEDDING_BATCH)
    params.n_ubatch = params.n_batch
    params.kv_unified = True


def _description(model: Any) -> str:
    buffer = ctypes.create_string_buffer(128)
    ll.llama_model_desc(model, buffer, 128)
    return buffer.value.decode(errors="replace")
