"""Arrivals, cancels, priorities, shortages and completions at random: the engine keeps its promises in any order.

The scripted model draws each token from a checksum of the whole sequence, so one wrong token or cell shows in all that
follow. The harness checks the integrity of slots and cache, and counts the model's cells, after every tick.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine_harness import Harness, alone
from worker.backend import DecodeOutcome, SamplingParams
from worker.fake_backend import FakeBackend
from worker.requests import HandedBack, Token

#: What prompts are made of, so that many begin alike.
PARTS = ("a long beginning that many have in common, ", "and so it goes on. ", "x", "yy", "z" * 30)


@dataclass(frozen=True)
class Step:
    """One request, what is different about it, and how many ticks pass after it has come."""

    parts: tuple[int, ...]
    max_tokens: int
    priority: int
    temperature: float
    cache_prompt: bool
    grammar: bool
    stop: bool
    ticks: int
    cancels: int | None
    no_room: bool
    failing_puts: int

    def options(self, seed: int) -> dict[str, object]:
        grammar = 'root ::= "some text"' if self.grammar else None
        return {
            "params": SamplingParams(temperature=self.temperature, seed=seed, grammar=grammar),
            "max_tokens": self.max_tokens,
            "stop": ("q",) if self.stop else (),
        }

    @property
    def prompt(self) -> str:
        return "".join(PARTS[i] for i in self.parts)


steps = st.builds(
    Step,
    parts=st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=3).map(tuple),
    max_tokens=st.integers(1, 60),
    priority=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 0.9]),
    cache_prompt=st.booleans(),
    grammar=st.booleans(),
    stop=st.booleans(),
    ticks=st.integers(0, 12),
    cancels=st.none() | st.integers(0, 5),
    no_room=st.booleans(),
    failing_puts=st.integers(0, 1),
)
caches = st.sampled_from(
    [
        {"n_ctx": 220},
        {"n_ctx": 400, "cached_prefixes": 0},
        {"n_ctx": 700, "kv_unified": False},
        {"n_ctx": 700, "kv_unified": False, "cached_prefixes": 1},
        {"n_ctx": 240, "kv_unified": False, "can_unify": True},
        {"n_ctx": 400, "cannot_cut": True},
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(steps, min_size=1, max_size=12),
    cache=caches,
    pause_s=st.sampled_from([0.02, 5.0]),
    chunk=st.integers(1, 40),
)
def test_every_output_is_the_one_it_gives_alone_and_every_request_ends_once(
    work: list[Step], cache: dict[str, int], pause_s: float, chunk: int
) -> None:
    h = Harness(FakeBackend("babble", n_parallel=3, n_batch=64, **cache), chunk_size=chunk, pause_s=pause_s)
    cancelled = set()
    for i, step in enumerate(work):
        h.submit(f"r{i}", step.prompt, priority=step.priority, cache_prompt=step.cache_prompt, **step.options(i))
        if step.no_room:
            h.backend.outcomes.append(DecodeOutcome.NO_ROOM)
        h.backend.failing_puts += step.failing_puts
        if step.cancels is not None and step.cancels <= i:
            cancelled.add(f"r{step.cancels}")
            h.engine.cancel(f"execution-r{step.cancels}")
        h.tick(step.ticks)
        take_back(h)
    h.tick()
    while h.engine.pool.active or h.engine.waiting:
        h.tick(50)
        take_back(h)
    for i, step in enumerate(work):
        assert_as_alone(h, f"r{i}", alone("alone", step.prompt, **step.options(i)), may_be_short=f"r{i}" in cancelled)


def take_back(h: Harness) -> None:
    """What a worker's queue does: a request that was handed back comes again, with its tokens so far."""
    for event in [e for e in h.events if isinstance(e, HandedBack)]:
        h.events.remove(event)
        h.engine.submit(event.request)
        h.tick()


def assert_as_alone(h: Harness, name: str, whole: Harness, *, may_be_short: bool) -> None:
    end, expected = h.ended(name), whole.ended("alone")
    if end.error is not None:  # a pass without room while it was alone: nothing can be done about that
        assert end.error.code == "decode_failed"
        may_be_short = True
    said = h.tokens(name)
    assert [t.index for t in said] == list(range(len(said)))
    assert expected.text.startswith(end.text)
    if end.error is None:
        assert "".join(t.text for t in said) == end.text
    if not may_be_short:
        assert (end.text, end.finish_reason, end.tokens) == (expected.text, expected.finish_reason, expected.tokens)
    assert end.stats.generated_tokens <= expected.stats.generated_tokens


def test_the_test_notices_a_token_that_is_missing() -> None:
    h = Harness()
    h.submit("r0", "x")
    h.run()
    h.events = [e for e in h.events if not (isinstance(e, Token) and e.index == 2)]
    with pytest.raises(AssertionError):
        assert_as_alone(h, "r0", alone("alone", "x"), may_be_short=False)
