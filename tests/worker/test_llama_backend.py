from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.settings import WorkerSettings, load
from worker import llama_device, llama_native
from worker.backend import BatchItem, DecodeOutcome, Logits, ModelError
from worker.llama_backend import LlamaBackend
from worker.llama_native import collected_log, ll
from worker.machine import usable_cores

pytestmark = pytest.mark.model

#: How far logits of Q8_0 move with the make-up of a batch.
TOLERANCE = 1.5

Open = Callable[..., LlamaBackend]


def tokens_of(backend: LlamaBackend, text: str) -> list[int]:
    return backend.vocab.tokenize(text, parse_special=False)


def row_alone(backend: LlamaBackend, tokens: list[int], seq_id: int = 0) -> Logits:
    backend.clear(seq_id)
    assert backend.decode([BatchItem(seq_id, 0, tokens, True)]) is DecodeOutcome.DONE
    row = backend.logits()[0].copy()
    backend.clear(seq_id)
    return row


def test_what_the_model_is_can_be_told(llama: LlamaBackend) -> None:
    info = llama.info
    assert (info.layers, info.layers_offloaded) == (30, 0)
    assert (info.n_ctx, info.n_ctx_seq, info.n_ctx_train, info.n_batch) == (2048, 2048, 8192, 2048)
    # Four slots, and 64 sequences for prefixes.
    assert (info.n_parallel, info.n_seq_max, info.kv_unified) == (4, 68, True)
    # 30 layers, K and V, 3 heads of 64 numbers of 2 bytes.
    assert info.kv_bytes == 2048 * 30 * 2 * 3 * 64 * 2
    assert 100e6 < info.model_bytes < 200e6
    assert info.chat_template is not None and "<|im_start|>" in info.chat_template
    assert info.device and info.device != "unknown"
    assert info.max_request_tokens == 2048


def test_sequences_computed_together_equal_those_alone(llama: LlamaBackend) -> None:
    texts = [f"The {thing} of the story is about" for thing in ("cat", "king", "red house", "last day")]
    prompts = [tokens_of(llama, text) for text in texts]
    alone = [row_alone(llama, tokens) for tokens in prompts]
    # All but the last token of each, in chunks, then the last ones in another order.
    llama.decode([BatchItem(i, 0, tokens[:3], False) for i, tokens in enumerate(prompts)])
    assert llama.logits().shape == (0, llama.vocab.n_tokens)
    llama.decode([BatchItem(i, 3, tokens[3:-1], False) for i, tokens in enumerate(prompts)])
    order = [2, 0, 3, 1]
    llama.decode([BatchItem(i, len(prompts[i]) - 1, prompts[i][-1:], True) for i in order])
    assert llama.logits().shape == (4, llama.vocab.n_tokens)
    for row, i in zip(llama.logits(), order, strict=True):
        assert np.abs(row - alone[i]).max() < TOLERANCE
        assert row.argmax() == alone[i].argmax()
        assert all(np.abs(row - alone[j]).max() > 2 * TOLERANCE for j in order if j != i)


def test_rows_are_those_of_the_items_that_want_them(llama: LlamaBackend) -> None:
    first, second = tokens_of(llama, "Once upon a time there was"), tokens_of(llama, "import numpy as")
    llama.decode([BatchItem(0, 0, first, False), BatchItem(3, 0, second, True), BatchItem(1, 0, [5, 6, 7], False)])
    assert llama.logits().shape[0] == 1
    assert llama.logits()[0].argmax() == row_alone(llama, second, 2).argmax()


def test_rows_may_be_written_to(llama: LlamaBackend) -> None:
    llama.decode([BatchItem(0, 0, [5], True)])
    llama.logits()[0, :] = np.nan
    assert np.isnan(llama.logits()).all()


@pytest.mark.parametrize(
    "items",
    [
        [],
        [BatchItem(0, 0, [], True)],
        [BatchItem(0, 0, [1], True), BatchItem(1, 0, [], True)],
        [BatchItem(0, 0, [1] * 2049, True)],
        [BatchItem(0, 0, [1] * 2000, True), BatchItem(1, 0, [1] * 49, True)],
        [BatchItem(68, 0, [1], True)],
        [BatchItem(-1, 0, [1], True)],
    ],
)
def test_a_batch_beyond_the_limits_is_refused(llama: LlamaBackend, items: list[BatchItem]) -> None:
    with pytest.raises(ValueError, match="batch|sequence"):
        llama.decode(items)


@pytest.mark.parametrize(
    "item", [BatchItem(0, 7, [1], True), BatchItem(0, 0, [-1], True), BatchItem(0, 0, [49152], True)]
)
def test_a_batch_that_llama_cpp_refuses_has_failed(llama: LlamaBackend, item: BatchItem) -> None:
    llama.decode([BatchItem(0, 0, [1, 2], True)])
    assert llama.decode([item]) is DecodeOutcome.FAILED
    assert len(llama.logits()) == 0


@pytest.fixture(scope="module")
def small(open_llama: Open) -> LlamaBackend:
    return open_llama(n_ctx=256, n_parallel=4)


def test_a_full_cache_refuses_without_change(small: LlamaBackend) -> None:
    tokens = tokens_of(small, "one two three four five six seven eight nine ten " * 30)
    for seq_id in range(4):
        small.clear(seq_id)
    assert small.decode([BatchItem(0, 0, tokens[:100], False)]) is DecodeOutcome.DONE
    assert small.decode([BatchItem(1, 0, tokens[:150], False)]) is DecodeOutcome.DONE
    assert small.decode([BatchItem(0, 100, tokens[100:120], True)]) is DecodeOutcome.NO_ROOM
    assert len(small.logits()) == 0
    small.clear(1)
    assert small.decode([BatchItem(0, 100, tokens[100:120], True)]) is DecodeOutcome.DONE
    row = small.logits()[0].copy()
    assert np.abs(row - row_alone(small, tokens[:120], 2)).max() < TOLERANCE
    small.clear(0)


def test_a_cut_sequence_goes_on_from_the_cut(llama: LlamaBackend) -> None:
    wanted = tokens_of(llama, "The capital of France is")
    llama.decode([BatchItem(1, 0, wanted[:3] + tokens_of(llama, " Germany and of Spain"), True)])
    assert llama.cut(1, 3)
    llama.decode([BatchItem(1, 3, wanted[3:], True)])
    assert np.abs(llama.logits()[0] - row_alone(llama, wanted, 2)).max() < TOLERANCE


def test_a_cleared_sequence_leaves_the_others_alone(llama: LlamaBackend) -> None:
    tokens = tokens_of(llama, "The capital of France is")
    alone = row_alone(llama, tokens)
    llama.decode([BatchItem(0, 0, tokens[:-1], False), BatchItem(1, 0, [7] * 50, False)])
    llama.clear(1)
    llama.decode([BatchItem(0, len(tokens) - 1, tokens[-1:], True), BatchItem(1, 0, [9], True)])
    assert np.abs(llama.logits()[0] - alone).max() < TOLERANCE


def test_slots_apart_have_a_share_of_the_context_each(open_llama: Open) -> None:
    info = open_llama(n_ctx=2048, n_parallel=4, kv_unified="off").info
    assert (info.n_ctx, info.n_ctx_seq, info.max_request_tokens) == (2048, 512, 512)


def test_the_real_context_is_told_where_llama_cpp_rounds_it(open_llama: Open) -> None:
    assert open_llama(n_ctx=300, n_parallel=2, n_batch=64).info.n_ctx == 512


@pytest.mark.parametrize(
    "given", [{"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, {"flash_attn": "off"}, {"n_ubatch": 64}]
)
def test_options_reach_llama_cpp(open_llama: Open, given: dict[str, Any]) -> None:
    backend = open_llama(n_ctx=256, **given)
    assert backend.decode([BatchItem(0, 0, [5, 6, 7], True)]) is DecodeOutcome.DONE
    bytes_of_a_number = 34 / 32 if "cache_type_k" in given else 2
    assert backend.info.kv_bytes == pytest.approx(256 * 30 * 2 * 3 * 64 * bytes_of_a_number, rel=0.02)


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"threads": 1}, (1, 1)),
        ({"threads": 1, "threads_batch": 2}, (1, 2)),
        ({"threads_batch": 1}, (None, 1)),
        ({}, (None,) * 2),
    ],
)
def test_decode_and_prefill_have_threads_of_their_own(
    open_llama: Open, given: dict[str, int], threads: tuple[int | None, int | None]
) -> None:
    context = open_llama(n_ctx=256, **given)._context
    found = (ll.llama_n_threads(context), ll.llama_n_threads_batch(context))
    assert found == tuple(usable_cores() if count is None else count for count in threads)


def test_a_log_that_is_collected_inside_another_leaves_it_whole() -> None:
    with collected_log() as outer:
        llama_native._log(2, b"one", None)
        with collected_log() as inner:
            llama_native._log(2, b"two", None)
        llama_native._log(2, b"three", None)
    assert [line for _, line in outer] == ["one", "three"]
    assert [line for _, line in inner] == ["two"]


def test_closing_twice_does_nothing(demo_model: Path) -> None:
    backend = LlamaBackend(load(WorkerSettings, {"model_path": str(demo_model), "n_ctx": 256}))
    backend.close()
    backend.close()
    assert backend._model is None and backend._context is None


@pytest.fixture
def broken(tmp_path: Path, demo_model: Path) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        path = tmp_path / f"{kind}.gguf"
        if kind == "text":
            path.write_text("not a model at all")
        elif kind == "empty":
            path.touch()
        elif kind == "folder":
            path.mkdir()
        elif kind != "missing":
            with demo_model.open("rb") as file:
                path.write_bytes(file.read({"header": 20, "metadata": 100_000, "tensors": 20_000_000}[kind]))
        return path

    return make


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "does not exist; set model_path"),
        ("folder", "is not a file"),
        ("empty", "is not a GGUF file"),
        ("text", "is not a GGUF file"),
        ("header", "cannot load"),
        ("metadata", "cannot load"),
        ("tensors", "cannot load"),
    ],
)
def test_a_file_that_is_no_model_is_one_line(
    broken: Callable[[str], Path], kind: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = broken(kind)
    with pytest.raises(ModelError, match=message) as caught:
        LlamaBackend(load(WorkerSettings, {"model_path": str(path)}))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_context_too_small_for_the_slots_is_refused(demo_model: Path) -> None:
    with pytest.raises(ModelError, match="n_ctx 100 is too small for 8 slots; set it to 256 or more"):
        LlamaBackend(load(WorkerSettings, {"model_path": str(demo_model), "n_ctx": 100, "n_parallel": 8}))


def test_a_cache_that_llama_cpp_cannot_make_is_one_line(demo_model: Path) -> None:
    given = {"model_path": str(demo_model), "n_ctx": 256, "cache_type_v": "q8_0", "flash_attn": "off"}
    with pytest.raises(ModelError, match="cannot make a context: .*flash") as caught:
        LlamaBackend(load(WorkerSettings, given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["cuda", "metal", "vulkan"])
def test_a_gpu_that_lies_idle_is_a_warning(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(llama_device, "_gpu_of_machine", lambda: kind)
    monkeypatch.setattr(llama_device.ll, "llama_supports_gpu_offload", lambda: False)
    assert f"make up GPU={kind}" in (llama_device.unused_gpu_warning(99) or "")
    assert llama_device.unused_gpu_warning(0) is None
    monkeypatch.setattr(llama_device.ll, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(llama_device, "device_names", lambda gpu: [])
    assert "driver" in (llama_device.unused_gpu_warning(99) or "")


def test_a_context_begins_apart_and_becomes_one_buffer_for_a_request_that_needs_it(open_llama: Open) -> None:
    backend = open_llama(n_ctx=4096, n_parallel=2)
    tokens = tokens_of(backend, "The last day of the story began with a king who had lost his red house.")
    before = row_alone(backend, tokens)
    assert (backend.info.kv_unified, backend.info.n_ctx_seq, backend.info.n_seq_max) == (False, 2048, 2)
    assert (backend.info.can_unify, backend.info.max_request_tokens) == (True, 4096)
    backend.unify()
    assert (backend.info.kv_unified, backend.info.n_ctx_seq, backend.info.n_seq_max) == (True, 4096, 66)
    assert (backend.info.can_unify, backend.info.max_request_tokens) == (False, 4096)
    assert np.abs(row_alone(backend, tokens, seq_id=40) - before).max() < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "unified"),
    [
        ({"n_ctx": 4096, "n_parallel": 4}, False),
        ({"n_ctx": 4096, "n_parallel": 5}, True),  # 819 tokens each
        ({"n_ctx": 4096, "n_parallel": 4, "kv_unified": "on"}, True),
        ({"n_ctx": 1024, "n_parallel": 4, "kv_unified": "off"}, False),
        ({"n_ctx": 4096, "n_parallel": 1, "pooling": "mean"}, True),
    ],
)
def test_buffers_are_apart_on_a_cpu_where_a_share_is_worth_it(
    open_llama: Open, settings: dict[str, Any], unified: bool
) -> None:
    assert open_llama(**settings).info.kv_unified is unified
