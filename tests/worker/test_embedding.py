from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadLogits, ContextLengthExceeded, UnsupportedCapability
from shared.settings import WorkerSettings, load
from tests.worker.engine_harness import Harness
from tests.worker.tiny_bert import CONTEXT, WIDTH, write_tiny_bert
from worker.backend import BatchItem, Logits, ModelError
from worker.batching import SlotView, WholePrompts
from worker.embedding import to_base64, unit
from worker.fake_backend import N_EMBD, FakeBackend
from worker.llama_backend import LlamaBackend
from worker.requests import Token
from worker.sizing import EMBEDDING_BATCH


class Embedder(Harness):
    """A harness over a backend loaded for embeddings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(FakeBackend(**{"embeds": True, **options}))
        self.engine._strategy = WholePrompts()

    def embedding(self, name: str) -> Logits:
        embedding = self.ended(name).embedding
        assert embedding is not None
        return embedding


def embedded_alone(prompt: str) -> Logits:
    harness = Embedder()
    harness.submit("a", prompt, embed=True)
    harness.run()
    return harness.embedding("a")


def test_an_embedding_is_scaled_to_length_one() -> None:
    scaled = unit(np.array([3, 0, 4], np.float32))
    assert scaled.dtype == np.float32 and scaled.tolist() == pytest.approx([0.6, 0, 0.8])


@pytest.mark.parametrize("bad", [[0, 0], [np.nan, 1], [np.inf, 1]])
def test_what_has_no_direction_is_no_embedding(bad: list[float]) -> None:
    with pytest.raises(BadLogits):
        unit(np.array(bad, np.float32))


def test_base64_holds_little_endian_floats() -> None:
    assert base64.b64decode(to_base64(np.array([1, -2], np.float32))) == bytes.fromhex("0000803f000000c0")


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(60, 200))
def test_whole_prompts_are_never_cut_and_the_oldest_always_fits(sizes: list[int], budget: int) -> None:
    plan = WholePrompts().plan([SlotView(i, size, chunk=8) for i, size in enumerate(sizes)], budget)
    assert plan.tokens <= budget
    assert all(item.tokens == sizes[item.slot] and item.wants_logits for item in plan.items)
    assert not sizes or plan.items[0].slot == 0


def test_prompts_are_embedded_together_in_one_pass_each_as_alone() -> None:
    harness = Embedder(n_parallel=4)
    for i in range(4):
        harness.submit(f"r{i}", "x" * (i + 1), embed=True)
    harness.tick()
    assert [len(items) for items in harness.backend.passes] == [4]
    for i in range(4):
        assert np.array_equal(harness.embedding(f"r{i}"), embedded_alone("x" * (i + 1)))
        assert np.linalg.norm(harness.embedding(f"r{i}")) == pytest.approx(1, abs=1e-6)


def test_an_embedding_has_no_tokens_and_leaves_nothing_behind() -> None:
    harness = Embedder()
    harness.submit("a", "hello", embed=True, cache_prompt=True)
    harness.run()
    ended = harness.ended("a")
    assert not [e for e in harness.events if isinstance(e, Token)]
    assert (ended.finish_reason, ended.tokens, ended.text) == ("stop", 0, "")
    assert (ended.stats.prompt_tokens, ended.stats.generated_tokens) == (5, 0)
    assert not any(harness.backend.cache) and harness.engine.cache.tokens == 0
    assert harness.engine.tokens == 0 and harness.engine.prompt_tokens == 5


def test_more_prompts_than_a_pass_holds_wait_for_the_next() -> None:
    harness = Embedder(n_parallel=4, n_batch=100)
    for i, size in enumerate((60, 60, 30, 60)):
        harness.submit(f"r{i}", "x" * size, embed=True)
    harness.run()
    assert [[len(i.tokens) for i in items] for items in harness.backend.passes] == [[60, 30], [60], [60]]
    assert all(harness.ended(f"r{i}").error is None for i in range(4))


def test_a_prompt_longer_than_a_pass_is_refused_with_the_numbers() -> None:
    harness = Embedder(n_batch=100)
    harness.submit("long", "x" * 101, embed=True)
    harness.submit("short", "x" * 100, embed=True)
    harness.run()
    error = harness.ended("long").error
    assert isinstance(error, ContextLengthExceeded) and "101" in error.message and "100" in error.message
    assert harness.ended("short").error is None


@pytest.mark.parametrize("embeds", [True, False])
def test_a_worker_serves_what_it_was_started_for(embeds: bool) -> None:
    harness = Embedder(embeds=embeds)
    harness.submit("other", embed=not embeds)
    harness.submit("same", embed=embeds)
    harness.run()
    assert isinstance(harness.ended("other").error, UnsupportedCapability)
    assert harness.ended("same").error is None


def test_an_embedding_that_is_not_finite_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Embedder()
    made = harness.backend.embedding

    def broken(seq_id: int) -> Logits:
        return made(seq_id) * (np.nan if seq_id == 1 else 1)

    monkeypatch.setattr(harness.backend, "embedding", broken)
    for name in "abc":
        harness.submit(name, embed=True)
    harness.run()
    assert isinstance(harness.ended("b").error, BadLogits) and harness.ended("b").embedding is None
    assert harness.ended("a").embedding is not None and harness.ended("c").embedding is not None


def test_a_cancelled_embedding_computes_nothing() -> None:
    harness = Embedder()
    harness.submit("a", embed=True)
    harness.engine.cancel("execution-a")
    harness.tick()
    assert harness.ended("a").finish_reason == "cancelled" and not harness.backend.passes


def test_the_scripted_backend_embeds_where_pooling_is_set() -> None:
    info = FakeBackend.from_settings(load(WorkerSettings, {"model_path": "fake:echo", "pooling": "mean"})).info
    assert info.n_embd == N_EMBD
    assert FakeBackend.from_settings(load(WorkerSettings, {"model_path": "fake:echo"})).info.n_embd is None


# --- the demo model ---

TEXTS = ("A cat sleeps.", "The train to Ulm leaves at nine and is, as always, late.", "1 + 1 = 2", "rain " * 60)


@pytest.fixture(scope="module")
def embedder(open_llama: Callable[..., LlamaBackend]) -> LlamaBackend:
    return open_llama(n_ctx=1024, n_parallel=4, n_batch=512, pooling="mean")


def embed(backend: LlamaBackend, *texts: str) -> list[Logits]:
    prompts = [backend.vocab.tokenize(text, parse_special=False) for text in texts]
    backend.decode([BatchItem(i, 0, tokens, True) for i, tokens in enumerate(prompts)])
    found = [unit(backend.embedding(i)) for i in range(len(texts))]
    for i in range(len(texts)):
        backend.clear(i)
    return found


@pytest.mark.model
def test_embeddings_made_together_equal_those_made_alone(embedder: LlamaBackend) -> None:
    together = embed(embedder, *TEXTS)
    for text, found in zip(TEXTS, together, strict=True):
        (alone,) = embed(embedder, text)
        assert found @ alone > 1 - 1e-3
        assert found.shape == (embedder.info.n_embd,) == (576,)
    others = [together[i] @ together[j] for i in range(4) for j in range(i)]
    assert max(others) < 0.999


@pytest.mark.model
def test_the_order_in_a_pass_changes_nothing(embedder: LlamaBackend) -> None:
    for a, b in zip(embed(embedder, *TEXTS), embed(embedder, *TEXTS[::-1])[::-1], strict=True):
        assert a @ b > 1 - 1e-3


@pytest.mark.model
def test_mean_pooling_is_the_mean_over_the_tokens_of_the_last_layer(open_llama: Callable[..., LlamaBackend]) -> None:
    """The last token's own vector comes from `last`; with one token, mean and last are the same thing."""
    mean, last = (open_llama(n_ctx=256, n_parallel=1, pooling=kind) for kind in ("mean", "last"))
    (one,), (other,) = ([*embed(backend, "cat")] for backend in (mean, last))
    assert one @ other > 1 - 1e-3
    (one,), (other,) = (embed(backend, "A cat sleeps on the mat.") for backend in (mean, last))
    assert one @ other < 0.999


@pytest.mark.model
def test_a_sequence_that_was_not_in_the_pass_has_no_embedding(embedder: LlamaBackend) -> None:
    embedder.decode([BatchItem(0, 0, [5, 6, 7], True)])
    with pytest.raises(ValueError, match="sequence 3"):
        embedder.embedding(3)
    assert embedder.logits().shape[0] == 0
    embedder.clear(0)


@pytest.mark.model
def test_a_pass_for_embeddings_is_bounded_and_computed_in_one_piece(open_llama: Callable[..., LlamaBackend]) -> None:
    backend = open_llama(n_ctx=4096, n_parallel=2, kv_unified="off", pooling="cls")
    assert backend.info.n_batch == EMBEDDING_BATCH
    # Never a KV buffer for each sequence: llama.cpp would cut sequences of different lengths up.
    assert backend.info.n_ctx_seq == 4096


# --- a model that only makes embeddings ---


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


@pytest.mark.model
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_model_without_a_cache_embeds_together_as_alone(bert_file: Path, pooling: str) -> None:
    settings = load(WorkerSettings, {"model_path": str(bert_file), "n_ctx": 512, "n_parallel": 4, "pooling": pooling})
    backend = LlamaBackend(settings)
    try:
        together = embed(backend, "hello world", "a b c d", "zz")
        alone = [embed(backend, text)[0] for text in ("hello world", "a b c d", "zz")]
        assert [a @ b for a, b in zip(together, alone, strict=True)] == pytest.approx([1, 1, 1], abs=1e-4)
        assert together[0] @ together[1] < 0.999
        assert (backend.info.n_embd, backend.info.max_request_tokens) == (WIDTH, CONTEXT)
        assert not backend.cut(0, 1)
    finally:
        backend.close()


@pytest.mark.model
def test_a_model_without_a_cache_writes_no_answers(bert_file: Path) -> None:
    with pytest.raises(ModelError, match="start it with --pooling"):
        LlamaBackend(load(WorkerSettings, {"model_path": str(bert_file), "n_ctx": 512}))
