"""An engine over the scripted backend, driven tick by tick with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.backend import SamplingParams
from worker.batching import load_strategy
from worker.engine import Engine
from worker.fake_backend import FakeBackend
from worker.fake_scripts import EOS, SPOKEN, Script
from worker.requests import Ended, Event, Request, Token


class Harness:
    """Collects what the engine says, and checks integrity after every tick."""

    def __init__(self, backend: FakeBackend | None = None, strategy: str = "decode_maximal", **engine: Any) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.backend = backend or FakeBackend("babble")
        self.engine = Engine(
            self.backend, load_strategy(strategy), self.events.extend, clock=lambda: self.now, **engine
        )

    def submit(self, name: str, prompt: str = "", **options: Any) -> Request:
        """Submit a request whose prompt is a text of its own."""
        params = options.pop("params", SamplingParams())
        tokens = options.pop("tokens", tuple((prompt or f"prompt of {name}").encode()))
        options.setdefault("max_tokens", 16)
        request = Request(name, f"execution-{name}", tokens, params, **options)
        self.engine.submit(request)
        return request

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 0.01
            self.engine.tick()
            self.engine.check_integrity()
            if isinstance(self.backend, FakeBackend) and self.backend.info.kv_unified:
                assert self.engine.cache.used == self.backend.used, "the engine miscounts the cells of the KV cache"

    def run(self, limit: int = 10_000) -> None:
        """Tick until nothing is left to do."""
        for _ in range(limit):
            self.tick()
            if not self.engine.pool.active and not self.engine.waiting:
                return
        raise AssertionError("the engine does not come to an end")

    def ended(self, name: str) -> Ended:
        (end,) = [e for e in self.events if isinstance(e, Ended) and e.request.id == name]
        return end

    def tokens(self, name: str) -> list[Token]:
        return [e for e in self.events if isinstance(e, Token) and e.request.id == name]

    def text(self, name: str) -> str:
        return "".join(e.text for e in self.tokens(name))


def alone(name: str, prompt: str = "", script: Any = "babble", **options: Any) -> Harness:
    """The same request with an engine to itself."""
    harness = Harness(FakeBackend(script))
    harness.submit(name, prompt, **options)
    harness.run()
    return harness


def saying(text: str) -> Script:
    """A script that answers every prompt with this text."""
    data = text.encode()

    def script(tokens: Sequence[int], prompt_len: int) -> int:
        place = len(tokens) - prompt_len
        return SPOKEN + data[place] if place < len(data) else EOS

    return script
