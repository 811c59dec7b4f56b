"""Priorities in the slots: who starts, who is displaced, and how it goes on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.worker.engine_harness import Harness, alone
from worker.backend import SamplingParams
from worker.fake_backend import FakeBackend
from worker.requests import Ended, HandedBack, Paused, Started

INTERACTIVE, NORMAL, BATCH = range(3)
HOT = SamplingParams(temperature=0.8, seed=7)


def working(h: Harness) -> set[str]:
    return {slot.request.id for slot in h.engine.pool.active if slot.request is not None}


def ends(h: Harness) -> list[str]:
    return [e.request.id for e in h.events if isinstance(e, Ended)]


def full(priority: int = BATCH, n_parallel: int = 3, **options: Any) -> Harness:
    """All slots are busy with less urgent work, each some tokens on."""
    h = Harness(FakeBackend("babble", n_parallel=n_parallel), **options)
    for i in range(n_parallel):
        h.submit(f"r{i}", priority=priority, params=HOT, max_tokens=40)
        h.tick(2)
    return h


@pytest.mark.parametrize(
    ("running", "comes", "displaces"),
    [(*pair, pair[1] < pair[0]) for pair in itertools.product(range(3), repeat=2)],
)
def test_only_more_urgent_work_takes_a_slot_over(running: int, comes: int, displaces: bool) -> None:
    h = full(running)
    h.submit("new", priority=comes)
    h.tick()
    assert ("new" in working(h)) == displaces
    assert len(working(h)) == 3


def test_an_urgent_request_is_computed_in_the_next_tick_and_the_youngest_of_the_least_urgent_makes_way() -> None:
    h = Harness(FakeBackend("babble", n_parallel=3))
    for name, priority in (("b1", BATCH), ("b2", BATCH), ("n", NORMAL)):
        h.submit(name, priority=priority, max_tokens=40)
        h.tick()
    h.submit("urgent", priority=INTERACTIVE)
    h.tick()
    assert working(h) == {"b1", "n", "urgent"}
    assert len(h.tokens("urgent")) == 1


@pytest.mark.parametrize("cache_prompt", [True, False])
@pytest.mark.parametrize("ticks", range(0, 30, 3))
def test_a_displaced_request_goes_on_as_if_nothing_had_happened_wherever_it_was(ticks: int, cache_prompt: bool) -> None:
    options: dict[str, Any] = {"params": HOT, "max_tokens": 20}
    h = Harness(FakeBackend("babble", n_parallel=1), chunk_size=3)
    h.submit("batch", priority=BATCH, cache_prompt=cache_prompt, **options)
    h.tick(ticks)
    h.submit("urgent", priority=INTERACTIVE, max_tokens=5)
    h.run()
    assert h.text("batch") == alone("batch", **options).text("batch")
    assert [t.index for t in h.tokens("batch")] == list(range(20))
    assert h.ended("batch").stats.generated_tokens == 20


def test_a_displaced_request_comes_back_before_younger_ones_of_its_priority() -> None:
    h = full()
    for i in range(3):
        h.submit(f"late{i}", priority=BATCH, max_tokens=2)
    h.submit("urgent", priority=INTERACTIVE, max_tokens=2)
    h.run()
    starts = [e.request.id for e in h.events if isinstance(e, Started)]
    assert starts.index("late0") > max(i for i, name in enumerate(starts) if name == "r2")


def test_what_was_displaced_for_too_long_is_handed_back_with_its_tokens() -> None:
    h = full(n_parallel=1, pause_s=5.0)
    made = len(h.tokens("r0"))
    h.submit("urgent", priority=INTERACTIVE, max_tokens=3000)
    h.tick()
    h.now += 4.9
    h.tick()
    assert not [e for e in h.events if isinstance(e, HandedBack)]
    h.now += 0.2
    h.tick()
    (back,) = [e for e in h.events if isinstance(e, HandedBack)]
    assert back.request.id == "r0" and len(back.request.generated) == made > 0
    (paused,) = [e for e in h.events if isinstance(e, Paused)]
    assert (paused.request.id, paused.tokens, paused.reason) == ("r0", made, "displaced")
    assert not h.engine.waiting
    h.engine.cancel("execution-urgent")
    h.run()
    assert ends(h) == ["urgent"]


def test_time_displaced_is_not_time_in_a_slot() -> None:
    h = Harness(FakeBackend("babble", n_parallel=1), pause_s=1000)
    h.submit("batch", priority=BATCH, max_tokens=20, timeout_s=1.0)
    h.tick(5)
    h.submit("urgent", priority=INTERACTIVE, max_tokens=50)
    h.tick()
    h.now += 100
    h.run()
    end = h.ended("batch")
    assert end.finish_reason == "length" and end.stats.duration_s < 1.0


def test_a_new_request_that_waits_long_is_not_handed_back() -> None:
    h = full(INTERACTIVE)
    h.submit("waits", priority=BATCH)
    h.now += 100
    h.tick()
    assert len(h.engine.waiting) == 1


def test_a_displaced_request_can_be_cancelled_and_has_its_text() -> None:
    h = full(n_parallel=1)
    said = h.text("r0")
    h.submit("urgent", priority=INTERACTIVE, max_tokens=50)
    h.tick()
    h.engine.cancel("execution-r0")
    h.tick()
    assert h.ended("r0").finish_reason == "cancelled"
    assert h.ended("r0").text == said != ""


def test_age_gives_order_but_no_immunity() -> None:
    h = full(INTERACTIVE, n_parallel=1)
    h.submit("fresh", priority=NORMAL, max_tokens=3)
    h.submit("old", priority=BATCH, rank=INTERACTIVE, max_tokens=30)
    h.engine.cancel("execution-r0")
    h.tick()
    assert working(h) == {"fresh"}  # it may take the slot from what is only old
    h.run()
    assert ends(h) == ["r0", "fresh", "old"]
    h = full(NORMAL, n_parallel=1)
    h.submit("fresh", priority=NORMAL, max_tokens=3)
    h.submit("old", priority=BATCH, rank=INTERACTIVE, max_tokens=30)
    h.engine.cancel("execution-r0")
    h.tick()
    h.submit("urgent", priority=INTERACTIVE, max_tokens=3)
    h.run()
    assert ends(h).index("urgent") < ends(h).index("old")


def test_urgent_requests_that_wait_for_room_displace_only_if_that_makes_enough() -> None:
    h = Harness(FakeBackend("babble", n_ctx=300, n_parallel=3))
    h.submit("big", "z" * 100, priority=INTERACTIVE, max_tokens=100)
    h.submit("small", "z" * 20, priority=BATCH, max_tokens=20)
    h.tick()
    h.submit("huge", "y" * 150, priority=INTERACTIVE, max_tokens=50)
    h.tick()
    assert working(h) == {"big", "small"}
    h.engine.cancel("execution-big")
    h.tick()
    assert "huge" in working(h)
    h.run()
    assert sorted(ends(h)) == ["big", "huge", "small"]


def test_urgent_work_takes_the_room_in_the_cache_as_well_as_the_slot() -> None:
    h = Harness(FakeBackend("babble", n_ctx=300, n_parallel=4))
    for i in range(2):
        h.submit(f"b{i}", "z" * 80, priority=BATCH, max_tokens=60)
    h.tick(3)
    h.submit("urgent", "y" * 100, priority=INTERACTIVE, max_tokens=100)
    h.tick()
    assert working(h) == {"urgent"} or working(h) == {"urgent", "b0"}
    assert h.tokens("urgent")
    h.run()
    for i in range(2):
        assert h.text(f"b{i}") == alone(f"b{i}", "z" * 80, max_tokens=60).text(f"b{i}")


def test_the_least_urgent_pauses_when_the_cache_runs_full_even_if_it_is_the_oldest() -> None:
    h = Harness(FakeBackend("babble", n_ctx=200, n_parallel=2))
    h.submit("old", "z" * 20, priority=BATCH, max_tokens=150, expected_tokens=10)
    h.tick()
    h.submit("urgent", "y" * 20, priority=INTERACTIVE, max_tokens=150, expected_tokens=10)
    h.run()
    assert ends(h) == ["urgent", "old"]
    assert [t.index for t in h.tokens("urgent")] == list(range(150))
    resumed = [e.request.id for e in h.events if isinstance(e, Started) and e.resumed]
    assert set(resumed) == {"old"}
    paused = [e for e in h.events if isinstance(e, Paused)]
    assert [(e.request.id, e.reason) for e in paused] == [("old", "no_room")] * len(resumed)


def test_while_an_urgent_prompt_is_prefilled_less_urgent_ones_only_decode() -> None:
    h = Harness(FakeBackend("babble", n_parallel=3), chunk_size=40)
    h.submit("decodes", priority=BATCH, max_tokens=100)
    h.tick()
    h.submit("prefills", "z" * 300, priority=BATCH)
    h.tick()
    h.submit("urgent", "y" * 60, priority=INTERACTIVE)
    before = len(h.backend.passes)
    h.tick(2)
    sizes = [sorted(len(item.tokens) for item in items) for items in list(h.backend.passes)[before:]]
    assert sizes == [[1, 40], [1, 20]]
    h.run()
    assert h.text("prefills") == alone("prefills", "z" * 300).text("prefills")


def test_who_is_waited_for_is_as_urgent_as_who_waits() -> None:
    shared = "a prefix of more than a few tokens, which both of them have " * 4
    h = Harness(FakeBackend("babble", n_parallel=3), chunk_size=50)
    h.submit("donor", shared + "1", priority=BATCH, cache_prompt=True)
    h.tick()
    h.submit("urgent", shared + "2", priority=INTERACTIVE, cache_prompt=True)
    h.submit("other", "y" * 300, priority=NORMAL)
    for _ in range(20):
        h.tick()
        if h.tokens("urgent"):
            break
    assert not h.tokens("other"), "the prefill of what is less urgent came first"
    h.run()
    assert h.ended("urgent").stats.cached_tokens >= len(shared)


def test_the_prefill_of_all_slots_together_keeps_within_one_chunk() -> None:
    h = Harness(FakeBackend("babble", n_parallel=4), chunk_size=100)
    for i in range(4):
        h.submit(f"r{i}", f"{i}" * 250, max_tokens=5)
    h.run()
    for items in h.backend.passes:
        assert sum(len(item.tokens) for item in items if len(item.tokens) > 1) <= 100
    assert max(sum(len(item.tokens) for item in items) for items in h.backend.passes) >= 100


def test_tokens_are_counted_by_the_queue_they_were_computed_for() -> None:
    h = Harness()
    h.submit("a", "z" * 10, queue="m:normal:one", max_tokens=5)
    h.submit("b", "y" * 20, queue="m:normal:two", max_tokens=3)
    h.run()
    assert h.engine.served == {"m:normal:one": 14, "m:normal:two": 22}
