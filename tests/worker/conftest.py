"""Fixtures of the worker's tests: the demo model, loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.settings import WorkerSettings, load
from worker.demo import demo_model_path
from worker.llama_backend import LlamaBackend


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the demo model."""
    return demo_model_path()


@pytest.fixture(scope="session")
def open_llama(demo_model: Path) -> Iterator[Callable[..., LlamaBackend]]:
    """Loads the demo model with settings of one's own; it is closed at the end of the run."""
    opened: list[LlamaBackend] = []

    def open_(**given: Any) -> LlamaBackend:
        defaults = {"model_path": str(demo_model), "n_ctx": 2048, "n_parallel": 4}
        opened.append(LlamaBackend(load(WorkerSettings, defaults | given)))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture(scope="session")
def shared_llama(open_llama: Callable[..., LlamaBackend]) -> LlamaBackend:
    return open_llama()


@pytest.fixture
def llama(shared_llama: LlamaBackend) -> Iterator[LlamaBackend]:
    """The demo model with 2,048 tokens of context and 4 slots, empty at the start and the end of a test."""
    for seq_id in range(shared_llama.info.n_seq_max):
        shared_llama.clear(seq_id)
    yield shared_llama
    for seq_id in range(shared_llama.info.n_seq_max):
        shared_llama.clear(seq_id)
