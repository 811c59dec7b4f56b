"""What a loaded model needs for a context, found out by making two small ones.

A context's memory grows in proportion to `n_ctx`, so two sizes tell what it takes in any case and what each token
adds: for every kind of model, cache type and split over devices, where a formula for each of a hundred architectures
would have to be kept up with llama.cpp. It takes a few tenths of a second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from shared.settings import WorkerSettings
from worker.backend import ModelError
from worker.llama_device import free_gpu_memory
from worker.llama_native import collected_log, first_error, ll
from worker.llama_params import context_params, sequences
from worker.machine import free_memory
from worker.sizing import EMBEDDING_BATCH, USEFUL_ON_CPU, USEFUL_ON_GPU, Model, Place, Sizes

#: How much of what is free may be taken. A GPU is there for the model; RAM is needed by everything else too.
SHARE_OF_GPU = 0.9
SHARE_OF_RAM = 0.5

RAM = "RAM"

#: A line such as `llama_kv_cache:      CUDA0 KV buffer size =   180.00 MiB`.
_BUFFER = re.compile(r"(\S+) +(?:DSV4 \w+ )?(model|KV|RS|state|compute|output) buffer size *= *([\d.]+) MiB")

#: Bytes by kind and llama.cpp's name of the buffer.
Buffers = Counter[tuple[str, str]]


def buffers(log: Iterable[str]) -> Buffers:
    """The buffers that a log tells of."""
    found: Buffers = Counter()
    for line in log:
        for name, kind, mib in _BUFFER.findall(line):
            found[kind, name] += round(float(mib) * 2**20)
    return found


def look_at(model: Any, settings: WorkerSettings, loading: Iterable[str], most_slots: int | None = None) -> Model:
    """Find out what sizes depend on. `loading` is what llama.cpp logged while it loaded the model.

    Raises:
        ModelError: not even a small context can be made.
    """
    gpus = free_gpu_memory()
    small_size = EMBEDDING_BATCH if settings.pooling != "none" else max(1024, settings.n_ubatch)
    small, large = (_trial(model, settings, small_size * times) for times in (1, 2))
    held = buffers(loading)
    # What is mapped from the file lies in memory only once it is read.
    mapped = sum(size for (kind, name), size in held.items() if kind == "model" and name.endswith("_Mapped"))
    free = {name: round(size * SHARE_OF_GPU) for name, size in gpus.items()}
    free[RAM] = max(0, round((free_memory() - mapped) * SHARE_OF_RAM))
    on_gpu = any(kind == "model" and name in gpus for kind, name in held)
    spare = sequences(settings, model, 1, unified=settings.kv_unified != "off") - 1
    return Model(
        n_ctx_train=ll.llama_model_n_ctx_train(model),
        places=[_place(name, bytes_, small, large, small_size, gpus) for name, bytes_ in free.items()],
        most_slots=most_slots or (USEFUL_ON_GPU if on_gpu else USEFUL_ON_CPU),
        spare_sequences=spare,
    )


def _trial(model: Any, settings: WorkerSettings, n_ctx: int) -> Buffers:
    with collected_log() as log:
        context = ll.llama_init_from_model(model, context_params(settings, Sizes(n_ctx, 1), 1, unified=True))
    if not context:
        raise ModelError(f"llama.cpp cannot make a context of {n_ctx} tokens: {first_error(log)}")
    ll.llama_free(context)
    return buffers(line for _, line in log)


def _place(name: str, free: int, small: Buffers, large: Buffers, size: int, gpus: dict[str, int]) -> Place:
    """What one sequence takes here. A buffer that is not a GPU's is in RAM, whatever it is called."""

    def here(found: Buffers, *kinds: str) -> int:
        places = ((kind, where if where in gpus else RAM, bytes_) for (kind, where), bytes_ in found.items())
        return sum(bytes_ for kind, where, bytes_ in places if kind in kinds and where == name)

    first, second = (here(found, "KV", "compute") for found in (small, large))
    # A row of logits for each sequence, and the state of recurrent models.
    own = here(small, "output", "RS", "state")
    return Place(name, free, max(0, 2 * first - second), max(0.0, (second - first) / size), own)
