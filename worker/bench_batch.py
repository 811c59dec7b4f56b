"""The engine alone over the requests of a batch, for `slotline bench batch`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shared.settings import WorkerSettings
from worker.backend import Backend, SamplingParams
from worker.batching import load_strategy
from worker.engine import Engine
from worker.model_process import load_backend
from worker.plain_text import with_bos
from worker.requests import Ended, Event, Request


class EngineAlone:
    """A loaded model and nothing around it: no queue, no server, no text that anybody reads.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._backend: Backend = load_backend(settings)

    def run(self, prompts: Sequence[str], max_tokens: int, temperature: float) -> tuple[float, int]:
        """Seconds and new tokens of all prompts, each of which gets `max_tokens` tokens. On the calling thread."""
        requests = [self._request(place, prompt, max_tokens, temperature) for place, prompt in enumerate(prompts)]
        left, tokens = len(requests), 0

        def emit(events: list[Event]) -> None:
            nonlocal left, tokens
            for event in events:
                if isinstance(event, Ended):
                    assert event.error is None, f"a request of the bench failed: {event.error}"
                    left, tokens = left - 1, tokens + event.stats.generated_tokens
            if not left:
                engine.stop()

        engine = Engine(
            self._backend,
            load_strategy(self._settings.batch_strategy, self._settings.itl_target_ms),
            emit,
            chunk_size=self._settings.chunk_size,
        )
        for request in requests:
            engine.submit(request)
        began = time.perf_counter()
        engine.run()
        return time.perf_counter() - began, tokens

    def close(self) -> None:
        """Unload the model."""
        self._backend.close()

    def _request(self, place: int, prompt: str, max_tokens: int, temperature: float) -> Request:
        vocab, settings = self._backend.vocab, self._settings
        tokens = with_bos(vocab, vocab.tokenize(prompt, parse_special=True))
        params = SamplingParams(
            temperature=temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=place,
            ignore_eos=True,
        )
        return Request(str(place), str(place), tuple(tokens), params, max_tokens)
