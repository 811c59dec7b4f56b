"""The main job with the real model: a worker process, many jobs at once, and what must hold for their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.jobs import JobStore
from shared.settings import WorkerSettings, load
from tests.integration.conftest import Jobs, Stack, StartWorker
from tests.processes import WorkerProcess, eventually
from worker.backend import BatchItem
from worker.demo import demo_model_path
from worker.llama_backend import LlamaBackend

pytestmark = [pytest.mark.integration, pytest.mark.model]

#: How far the logits of Q8_0 move with the make-up of a batch (docs/behaviour.md).
BOUND = 1.2

MARKERS = ["apple", "bridge", "candle", "dragon", "engine", "forest", "guitar", "harbor"] * 2


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model_path()


@pytest.fixture(scope="module")
def worker(stack: Stack, model: Path) -> WorkerProcess:
    return stack.worker(model=str(model), name="demo", n_parallel=8, n_ctx=4096)


@pytest.fixture
def jobs(stack: Stack, worker: WorkerProcess) -> Jobs:
    """Jobs for the worker that the tests share."""
    return Jobs(stack.store, "demo")


def replay_gaps(backend: LlamaBackend, prompt: list[int], answer: list[int]) -> list[float]:
    """How far each chosen token is from the best when an answer that ignores the end is computed alone."""
    gaps = []
    tokens, position = prompt, 0
    for chosen in answer:
        backend.decode([BatchItem(0, position, tokens, True)])
        row = backend.logits()[0]
        row[sorted(backend.vocab.eog)] = -np.inf  # the jobs ignore the end
        gaps.append(float(row.max() - row[chosen]))
        position += len(tokens)
        tokens = [chosen]
    backend.clear(0)
    return gaps


def test_sixteen_greedy_jobs_on_eight_slots_hold_up_when_replayed_alone(
    worker: WorkerProcess, jobs: Jobs, model: Path
) -> None:
    prompts = [f"Write one sentence number {i} about a {marker}." for i, marker in enumerate(MARKERS)]
    ids = [jobs.submit(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    eventually(lambda: worker.stats.active_slots == 8, "eight slots are active")
    views = [jobs.until(job_id, "completed") for job_id in ids]
    assert all(view["usage"]["completion_tokens"] == 40 for view in views)
    logged = [[t["token"] for t in jobs.store.stream.tokens(i) if t["token"] is not None] for i in ids]
    backend = LlamaBackend(load(WorkerSettings, {"model_path": str(model), "n_ctx": 512, "n_parallel": 1}))
    try:
        for prompt, tokens, view in zip(prompts, logged, views, strict=True):
            ids_of_prompt = backend.vocab.tokenize(prompt, parse_special=True)
            assert max(replay_gaps(backend, ids_of_prompt, tokens)) <= BOUND
            text = b"".join(map(backend.vocab.piece, tokens)).decode("utf-8", "replace")
            assert view["text"] == text
    finally:
        backend.close()


def test_no_job_shows_the_marker_of_another(jobs: Jobs) -> None:
    prompts = [f"The secret word is {marker}. The secret word is" for marker in MARKERS[:8]]
    for _ in range(2):
        ids = [jobs.submit(prompt, max_tokens=8) for prompt in prompts]
        for marker, job_id in zip(MARKERS, ids, strict=False):
            text = jobs.until(job_id, "completed")["text"]
            assert not [m for m in set(MARKERS) - {marker} if m in text], text


def test_hot_sampling_gives_valid_text_and_right_usage(jobs: Jobs) -> None:
    ids = [
        jobs.submit(f"hot {i}", temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=100, ignore_eos=True)
        for i in range(20)
    ]
    for job_id in ids:
        view = jobs.until(job_id, "completed")
        tokens = jobs.store.stream.tokens(job_id)
        view["text"].encode("utf-8")
        assert "".join(t["text"] for t in tokens) == view["text"]
        assert view["usage"]["completion_tokens"] == sum(t["token"] is not None for t in tokens) == 100


def test_all_kinds_of_sampling_share_one_tick(jobs: Jobs) -> None:
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 42},
        {"temperature": 0, "repeat_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0, "grammar": 'root ::= "yes" | "no"'},
        {"temperature": 1.0, "grammar": "root ::= [0-9]+", "ignore_eos": True},
        {"temperature": 0, "logit_bias": {"28": 100.0}},
        {"temperature": 0, "stop": ["."]},
        {"prompt": [1, 2, 3, 4], "temperature": 0},
    ]
    ids = [jobs.submit(**{"prompt": "Is water wet? Answer:", "max_tokens": 12, **body}) for body in bodies]
    views = [jobs.until(job_id, "completed") for job_id in ids]
    assert views[3]["text"] in ("yes", "no") and views[3]["finish_reason"] == "stop"
    assert views[4]["text"].isdecimal()
    assert "." not in views[6]["text"]
    assert views[5]["usage"]["completion_tokens"] == 12
    assert len({t["token"] for t in jobs.store.stream.tokens(ids[5])}) == 1


def test_chat_messages_are_rendered_by_the_models_template(jobs: Jobs) -> None:
    job_id = jobs.submit(
        prompt=None,  # type: ignore[arg-type]
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=24,
    )
    view = jobs.until(job_id, "completed")
    assert view["text"] and "<|im" not in view["text"]
    assert view["usage"]["prompt_tokens"] > 10


def test_a_second_turn_takes_its_prefix_from_the_cache(start_worker: StartWorker, store: JobStore, model: Path) -> None:
    start_worker(model=str(model), name="demo", n_parallel=1, n_ctx=2048, cache_prompt=True)
    jobs = Jobs(store, "demo")
    prompt = "A long and common beginning of a story about a small dog and a big house. " * 4
    first = jobs.until(jobs.submit(prompt + "One.", max_tokens=4), "completed")["usage"]
    second = jobs.until(jobs.submit(prompt + "Two.", max_tokens=4), "completed")["usage"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= second["prompt_tokens"] - 4


def test_the_logits_of_a_neighbour_stay_within_the_bound(model: Path) -> None:
    backend = LlamaBackend(load(WorkerSettings, {"model_path": str(model), "n_ctx": 1024, "n_parallel": 4}))
    try:
        prompts = [backend.vocab.tokenize(f"A tale of {m}", parse_special=True) for m in MARKERS[:4]]
        backend.decode([BatchItem(0, 0, prompts[0], True)])
        alone = backend.logits()[0].copy()
        backend.clear(0)
        backend.decode([BatchItem(i, 0, p, True) for i, p in enumerate(prompts)])
        assert float(np.abs(backend.logits()[0] - alone).max()) <= BOUND
    finally:
        backend.close()
