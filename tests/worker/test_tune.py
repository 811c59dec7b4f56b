from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.settings import WorkerSettings, load
from worker import tune
from worker.backend import BatchItem, DecodeOutcome, ModelError
from worker.fake_backend import FakeBackend
from worker.tune import DEPTH, Findings, Point, choose, measure


class Machine(FakeBackend):
    """A scripted model on a clock of its own, on which a pass takes 10 ms and each of its tokens 1 ms more."""

    def __init__(self, *, base_s: float = 0.01, token_s: float = 0.001, **given: Any) -> None:
        super().__init__("babble", n_ctx=64 * 512, n_batch=512, **given)
        self.base_s, self.token_s = base_s, token_s
        self.now_s = 0.0
        self.deepest = 0

    def decode(self, items: Sequence[BatchItem]) -> DecodeOutcome:
        outcome = super().decode(items)
        self.now_s += self.base_s + self.token_s * sum(len(item.tokens) for item in items)
        self.deepest = max(self.deepest, *map(len, self.cache))
        return outcome


def settings(**given: Any) -> WorkerSettings:
    return load(WorkerSettings, {"model_path": "fake:babble", "n_ctx": 0, "n_parallel": "auto"} | given)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Measures a machine on its own clock."""

    def run_(machine: Machine, seconds: float = 60, **given: Any) -> Findings:
        asked: list[Any] = []
        monkeypatch.setattr(tune, "load_backend", lambda s, most_slots: asked.append(most_slots) or machine)
        findings = measure(settings(**given), seconds, lambda text: None, lambda: machine.now_s)
        assert asked == [64] and machine.closed
        return findings

    return run_


def test_what_is_measured_is_what_the_machine_does(run) -> None:
    findings = run(Machine(n_parallel=64))
    assert findings.prefill_tok_s == pytest.approx(512 / (0.01 + 0.512), rel=0.001)
    assert findings.depth == DEPTH
    assert [point.slots for point in findings.points] == [1, 2, 4, 8, 16, 32, 64]
    for point in findings.points:
        assert point.ms_per_token == pytest.approx(10 + point.slots)
        assert point.tok_s == pytest.approx(1000 * point.slots / (10 + point.slots), rel=0.001)


def test_it_takes_the_time_it_is_given(run) -> None:
    for seconds in (40, 200):
        machine = Machine(n_parallel=64)
        run(machine, seconds=seconds)
        assert 0.6 * seconds < machine.now_s < 1.1 * seconds


def test_a_slow_model_is_measured_at_less_depth_and_as_far_as_the_time_goes(run) -> None:
    machine = Machine(n_parallel=64, base_s=0.5, token_s=0.1)
    findings = run(machine, seconds=60)
    assert findings.depth < DEPTH
    assert [point.slots for point in findings.points][0] == 1
    assert len(findings.points) < 7
    assert machine.now_s < 90


def test_slots_are_as_many_as_the_model_came_up_with(run) -> None:
    assert [point.slots for point in run(Machine(n_parallel=10)).points] == [1, 2, 4, 8]


def test_a_model_that_cannot_be_cut_is_measured_too(run) -> None:
    assert len(run(Machine(n_parallel=64, cannot_cut=True)).points) == 7


def test_no_slot_outgrows_its_share_of_the_context(run) -> None:
    machine = Machine(n_parallel=64, token_s=0.0, base_s=0.001)
    run(machine)
    assert machine.deepest <= 512


@pytest.mark.parametrize(
    ("given", "slots"), [({"n_ctx": 2048}, 32), ({"n_ctx": 64}, 1), ({"n_ctx": 8192, "n_batch": 4}, 4)]
)
def test_a_context_that_is_given_is_kept(given: dict[str, int], slots: int) -> None:
    findings = measure(settings(**given), 0.3, lambda text: None)
    assert findings.n_ctx == given["n_ctx"]
    assert findings.points[-1].slots <= slots


def test_a_pass_that_fails_ends_it(run, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(n_parallel=64, outcomes=[DecodeOutcome.DONE] * 3 + [DecodeOutcome.FAILED])
    with pytest.raises(ModelError, match=r"a pass of \d+ tokens: failed"):
        run(machine)
    assert machine.closed


@pytest.mark.parametrize(
    ("points", "limit_ms", "best"),
    [
        # The most tokens per second that keep the time.
        ([(1, 100, 10), (2, 180, 11), (4, 300, 13), (8, 400, 20)], 100, 8),
        ([(1, 100, 10), (8, 400, 20), (16, 600, 26), (32, 900, 36)], 30, 16),
        # Nearly as many are enough.
        ([(1, 100, 10), (8, 400, 20), (16, 410, 39), (32, 415, 77)], 100, 8),
        # More slots that are slower do not count.
        ([(1, 100, 10), (8, 400, 20), (16, 300, 53)], 100, 8),
        # A model that is slow even alone may take twice as long.
        ([(1, 3, 300), (2, 5, 380), (4, 8, 500), (8, 9, 900)], 100, 4),
        ([(1, 3, 300)], 100, 1),
    ],
)
def test_the_best_is_the_fewest_slots_with_nearly_the_most_tokens(
    points: list[tuple[int, float, float]], limit_ms: float, best: int
) -> None:
    assert choose([Point(*point) for point in points], limit_ms).slots == best


@pytest.mark.model
def test_a_real_model_is_measured(demo_model: Path) -> None:
    said: list[str] = []
    findings = measure(settings(model_path=str(demo_model)), 1, said.append)
    assert findings.points[0].slots == 1
    assert findings.prefill_tok_s > 0
    assert findings.n_ctx == 8192
    assert said[0].startswith("prefill: ")
