"""What llama.cpp is told when a model is loaded and when a context is made for it."""

from __future__ import annotations

import ctypes
from typing import Any

from shared.settings import WorkerSettings
from worker.backend import ModelError
from worker.llama_native import ll
from worker.machine import usable_cores
from worker.sizing import EMBEDDING_BATCH, MOST_SEQUENCES, Sizes

_CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
#: Tokens of context for each slot, from which on `kv_unified auto` begins with buffers apart.
WORTHWHILE_SHARE = 1024

_POOLING = {"none": ll.LLAMA_POOLING_TYPE_NONE, "mean": ll.LLAMA_POOLING_TYPE_MEAN}
_POOLING |= {"cls": ll.LLAMA_POOLING_TYPE_CLS, "last": ll.LLAMA_POOLING_TYPE_LAST}
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}


def model_params(settings: WorkerSettings) -> Any:
    """How to load the model.

    Raises:
        ModelError: the tensors are to be split over more devices than there can be.
    """
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


def context_params(settings: WorkerSettings, sizes: Sizes, n_seq_max: int, *, unified: bool) -> Any:
    """How to make a context of these sizes, whose sequences are `n_seq_max` and share one buffer if `unified`."""
    n_batch = settings.n_batch or sizes.n_ctx
    params = ll.llama_context_default_params()
    params.n_ctx = sizes.n_ctx
    params.n_batch = n_batch
    params.n_ubatch = min(settings.n_ubatch, n_batch)
    params.n_seq_max = n_seq_max
    # llama.cpp makes room for so many rows of logits in a pass, by default for one of each token: 100 MB with a
    # vocabulary of 50,000. It aborts where there are more, or where there are more sequences.
    params.n_outputs_max = n_seq_max
    params.kv_unified = unified
    params.n_threads = settings.threads or usable_cores()
    params.n_threads_batch = settings.threads_batch or params.n_threads
    params.type_k = _CACHE_TYPES[settings.cache_type_k]
    params.type_v = _CACHE_TYPES[settings.cache_type_v]
    params.flash_attn_type = _FLASH_ATTN[settings.flash_attn]
    params.offload_kqv = True
    # A cache of the window's size forgets, at the latest when it is full, what a shared prefix would need.
    params.swa_full = True
    params.no_perf = True
    if settings.pooling != "none":
        _make_pooling(params, settings, sizes)
    return params


def sequences(settings: WorkerSettings, model: Any, slots: int, *, unified: bool) -> int:
    """How many sequences a context of so many slots has: one for each, and more where prefixes can be kept in them.

    In a unified cache one more costs a row of logits. Elsewhere each takes its share of the context, or a state of
    its own, which of a model that cannot be cut is of little use to others.
    """
    can_share = unified and settings.pooling == "none" and not keeps_states(model)
    return min(MOST_SEQUENCES, slots + settings.cached_prefixes) if can_share else slots


def keeps_states(model: Any) -> bool:
    """Whether the model keeps the last state of a sequence and none before it (recurrent and hybrid models)."""
    return bool(ll.llama_model_is_recurrent(model) or ll.llama_model_is_hybrid(model))


def begins_unified(settings: WorkerSettings, sizes: Sizes, *, on_gpu: bool) -> bool:
    """Whether all sequences share one buffer from the beginning.

    On a CPU each computed token is tested against every used cell of its buffer, so buffers apart are faster
    (docs/performance.md has the figures); but then no request may use more than its share, which must be worth it.
    """
    if settings.pooling != "none" or settings.kv_unified == "on":
        return True
    return settings.kv_unified == "auto" and (on_gpu or sizes.n_ctx // sizes.n_parallel < WORTHWHILE_SHARE)


def _make_pooling(params: Any, settings: WorkerSettings, sizes: Sizes) -> None:
    """Pool each sequence of a pass into one embedding, which takes that llama.cpp computes the pass in one piece.

    Source: llama.cpp pools within a micro-batch, and cuts sequences of different lengths up where each has a KV
    buffer of its own (`llama_kv_cache::init_batch`).
    """
    params.embeddings = True
    params.pooling_type = _POOLING[settings.pooling]
    params.n_batch = settings.n_batch or min(sizes.n_ctx, EMBEDDING_BATCH)
    params.n_ubatch = params.n_batch
    params.n_outputs_max = params.n_batch
