"""What llama.cpp says that a context takes, on a real model and on small ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.settings import WorkerSettings, load
from tests.worker.tiny_models import write_tiny_model
from worker import llama_sizing
from worker.backend import ModelError
from worker.llama_backend import LlamaBackend
from worker.llama_sizing import RAM, buffers
from worker.sizing import MIB, Model

Open = Callable[..., LlamaBackend]

LOG = """\
load_tensors:   CPU_Mapped model buffer size =   136.40 MiB
load_tensors:        CUDA0 model buffer size =  1000.00 MiB
llama_context:  CUDA_Host  output buffer size =     0.75 MiB
llama_kv_cache:      CUDA0 KV buffer size =   180.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =    20.00 MiB
llama_kv_cache: size =  180.00 MiB (  8192 cells,  30 layers,  4/1 seqs), K (f16):   90.00 MiB, V (f16):   90.00 MiB
llama_memory_recurrent:      CUDA1 RS buffer size =    12.50 MiB
llama_dsv4_comp_state:      CUDA0 DSV4 csa state buffer size =     2.00 MiB
sched_reserve:      CUDA0 compute buffer size =    98.25 MiB
""".splitlines()


def test_buffers_are_read_from_the_log() -> None:
    assert {key: size / MIB for key, size in buffers(LOG).items()} == {
        ("model", "CPU_Mapped"): pytest.approx(136.4),
        ("model", "CUDA0"): 1000,
        ("output", "CUDA_Host"): 0.75,
        ("KV", "CUDA0"): 200,
        ("RS", "CUDA1"): 12.5,
        ("state", "CUDA0"): 2,
        ("compute", "CUDA0"): 98.25,
    }


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """What was found out about the models that were loaded, with 1 GiB of RAM to give."""
    found: list[Model] = []
    real = llama_sizing.look_at

    def look_at(*args: Any) -> Model:
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr("worker.llama_backend.look_at", look_at)
    monkeypatch.setattr(llama_sizing, "free_memory", lambda: 2048 * MIB)
    return found


@pytest.mark.model
@pytest.mark.parametrize(
    ("given", "bytes_of_a_number"),
    [({}, 2), ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 34 / 32), ({"kv_unified": "off"}, 2)],
)
def test_a_token_takes_what_the_shape_of_the_model_says(
    open_llama: Open, seen: list[Model], given: dict[str, Any], bytes_of_a_number: float
) -> None:
    info = open_llama(n_ctx=0, n_parallel="auto", **given).info
    (place,) = seen[0].places
    # 30 layers, K and V, 3 heads of 64 numbers; beside it a mask, and little else that grows.
    kv = 30 * 2 * 3 * 64 * bytes_of_a_number
    assert info.kv_bytes == pytest.approx(info.n_ctx * kv, rel=0.001)
    assert kv <= place.per_token < 1.15 * kv
    assert (place.name, info.n_ctx, info.n_parallel) == (RAM, 8192, 16)


@pytest.mark.model
def test_without_flash_attention_a_token_takes_more(open_llama: Open, seen: list[Model]) -> None:
    for flash in ("on", "off"):
        open_llama(n_ctx=0, flash_attn=flash)
    with_it, without = (found.places[0].per_token for found in seen)
    # The scores of 9 heads for each of the 512 tokens that are computed at once.
    assert without - with_it > 9 * 512 * 4 * 0.9


@pytest.mark.model
def test_a_context_is_cut_to_what_memory_allows(
    open_llama: Open, seen: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_sizing, "free_memory", lambda: 320 * MIB)
    info = open_llama(n_ctx=0, n_parallel="auto").info
    (place,) = seen[0].places
    assert 1024 <= info.n_ctx < 8192
    assert 1 <= info.n_parallel < 16
    taken = place.fixed + info.n_ctx * place.per_token + info.n_seq_max * place.per_sequence
    assert 0 <= place.free - taken < 256 * place.per_token + place.per_sequence * 2


@pytest.mark.model
def test_a_model_that_does_not_fit_is_refused_with_both_numbers(
    open_llama: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_sizing, "free_memory", lambda: 160 * MIB)
    with pytest.raises(ModelError, match=r"takes \d+ MiB beside the model, and RAM has 1\d MiB to give"):
        open_llama(n_ctx=0, n_parallel="auto")


@pytest.mark.model
@pytest.mark.parametrize(
    ("kind", "state"),
    # For each layer of states, in float32: 3 inputs of the convolution and 8 numbers for each of 64 channels.
    [("mamba", 2 * (3 + 8) * 64 * 4), ("jamba", (3 + 8) * 64 * 4), ("gemma2", 0)],
)
def test_a_sequence_takes_a_row_of_logits_and_a_state(tmp_path: Path, seen: list[Model], kind: str, state: int) -> None:
    path = write_tiny_model(tmp_path / f"{kind}.gguf", kind)
    backend = LlamaBackend(load(WorkerSettings, {"model_path": str(path), "n_ctx": 0, "n_parallel": "auto"}))
    info = backend.info
    backend.close()
    (place,) = seen[0].places
    # llama.cpp tells sizes as hundredths of a MiB.
    assert place.per_sequence == pytest.approx(state + 4 * backend.vocab.n_tokens, abs=0.011 * MIB)
    assert seen[0].spare_sequences == (64 if kind == "gemma2" else 0)
    # 512 tokens for each slot, though the model itself has no more.
    assert (info.n_ctx, info.n_parallel, info.max_request_tokens) == (8192, 16, 512)


@pytest.mark.model
def test_no_more_slots_than_the_caller_wants(demo_model: Path) -> None:
    given = {"model_path": str(demo_model), "n_ctx": 8192, "n_parallel": "auto"}
    backend = LlamaBackend(load(WorkerSettings, given), most_slots=5)
    assert backend.info.n_parallel == 5
    backend.close()
