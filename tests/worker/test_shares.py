"""Tenants share a worker by tokens: the arithmetic, and a worker of one token a slot and tick that goes by it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.shares import QUANTUM_TOKENS, Shares


class Worker:
    """Takes jobs as the pull script does, and computes one token a tick for each."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.served: Counter[str] = Counter()
        self.shares = Shares(self.served)
        self.queues: dict[str, deque[int]] = {}
        self.running: list[tuple[str, int]] = []

    def submit(self, queue: str, costs: Iterable[int]) -> None:
        self.queues.setdefault(queue, deque()).extend(costs)

    def waiting(self) -> list[str]:
        return [name for name, jobs in self.queues.items() if jobs]

    def pull(self) -> None:
        held = Counter(name for name, _ in self.running)
        credits = self.shares.credits(self.queues, held)
        while len(self.running) < self.slots and (waiting := self.waiting()):
            name = max(waiting, key=credits.__getitem__)
            credits[name] -= QUANTUM_TOKENS
            self.running.append((name, self.queues[name].popleft()))
        self.shares.settle(self.waiting(), {name for name, _ in self.running})

    def run(self, ticks: int) -> Counter[str]:
        """The tokens that each queue was served within so many ticks."""
        before = self.served.copy()
        while ticks:
            self.pull()
            # Nothing happens before the next job ends.
            step = min([ticks, *(left for _, left in self.running)])
            for name, _ in self.running:
                self.served[name] += step
            self.running = [(name, left - step) for name, left in self.running if left > step]
            ticks -= step
        return self.served - before


def spread(served: Counter[str], *names: str) -> int:
    return max(served[n] for n in names) - min(served[n] for n in names)


def test_tenants_with_long_short_and_few_jobs_are_served_alike() -> None:
    worker = Worker(8)
    worker.submit("long", repeat(2000, 100))
    worker.submit("short", repeat(10, 10_000))
    worker.submit("few", repeat(200, 60))
    first, second = worker.run(2000), worker.run(2000)
    # A slot more or less for a while is what a job in it costs: three long ones of eight slots, and a bit.
    assert spread(first, "long", "short", "few") <= 4 * QUANTUM_TOKENS
    assert spread(first + second, "long", "short", "few") <= 4 * QUANTUM_TOKENS
    assert (first + second).total() == 4000 * 8


def test_many_jobs_get_a_tenant_no_more_than_one() -> None:
    worker = Worker(1)
    worker.submit("many", repeat(5, 10_000))
    worker.submit("one by one", [5])
    served: Counter[str] = Counter()
    for _ in range(400):
        served += worker.run(5)
        if not worker.queues["one by one"]:
            worker.submit("one by one", [5])
    assert spread(served, "many", "one by one") <= QUANTUM_TOKENS + 5


def test_who_comes_late_is_neither_behind_nor_ahead() -> None:
    worker = Worker(4)
    worker.submit("early", repeat(50, 10_000))
    worker.run(5000)
    worker.submit("late", repeat(50, 10_000))
    assert spread(worker.run(4000), "early", "late") <= 2 * QUANTUM_TOKENS


def test_who_pauses_saves_nothing_up() -> None:
    worker = Worker(4)
    worker.submit("steady", repeat(50, 100_000))
    worker.submit("comes and goes", repeat(50, 20))
    worker.run(5000)
    worker.submit("comes and goes", repeat(50, 10_000))
    assert spread(worker.run(4000), "steady", "comes and goes") <= 2 * QUANTUM_TOKENS


def test_what_was_had_beyond_the_share_is_made_up_for() -> None:
    worker = Worker(4)
    worker.submit("first", repeat(3000, 100))
    worker.submit("second", [])
    worker.run(1)
    worker.submit("second", repeat(30, 10_000))
    # All slots are taken for as long as the first jobs last; then the other one is served alone until it is even.
    assert worker.run(2990)["second"] == 0
    assert worker.run(2500)["first"] <= 4 * 10
    assert spread(worker.run(40_000), "first", "second") <= 4 * 3000 + QUANTUM_TOKENS


def test_a_tenant_that_rests_does_not_lose_its_debt_before_the_others_have_caught_up() -> None:
    served: Counter[str] = Counter()
    shares = Shares(served)
    shares.settle({"a", "b"}, {"a"})
    served["a"] += 1000
    shares.settle({"b"}, {"b"})
    assert shares.credits(["a", "b", "new"], {}) == {"a": -1000, "b": 0, "new": 0}
    served["b"] += 400
    shares.settle({"b"}, {"b"})
    assert shares.credits(["a", "b", "new"], {}) == {"a": -1000, "b": -400, "new": -400}
    served["b"] += 900
    shares.settle({"b"}, {"b"})
    assert shares.credits(["a", "b", "new"], {}) == {"a": -1300, "b": -1300, "new": -1300}


def test_a_held_job_is_reckoned_at_one_quantum() -> None:
    shares = Shares(Counter())
    assert shares.credits(["a", "b"], {"a": 2}) == {"a": -2 * QUANTUM_TOKENS, "b": 0}


def test_without_anybody_waiting_nothing_is_owed() -> None:
    served: Counter[str] = Counter()
    shares = Shares(served)
    shares.settle({"a", "b"}, {"a"})
    served["a"] += 1000
    shares.settle((), {"a"})
    assert shares.credits(["a", "b"], {}) == {"a": 0, "b": 0}


def test_no_trace_is_kept_of_a_tenant_that_is_gone() -> None:
    served: Counter[str] = Counter()
    shares = Shares(served)
    for number in range(1000):
        shares.settle({"steady", f"tenant {number}"}, {"steady"})
        served["steady"] += 100
        served[f"tenant {number}"] += 50
    assert len(shares._since) <= 3


arrivals = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(20, 400), st.integers(1, 30), st.integers(0, 300)), max_size=25
)


@settings(deadline=None, max_examples=150)
@given(arrivals, st.integers(1, 6))
def test_who_waits_all_the_time_gets_at_least_its_share_but_for_what_ran_already(
    arrivals: list[tuple[str, int, int, int]], slots: int
) -> None:
    worker = Worker(slots)
    worker.submit("waits", repeat(40, 100_000))
    for queue, cost, count, pause in arrivals:
        worker.submit(queue, repeat(cost, count))
        worker.run(pause)
    before = worker.served.copy()
    worker.run(2000)
    served = worker.served - before
    # Nobody else gets more than a fifth and what the jobs of a moment cost.
    slack = slots * (400 + QUANTUM_TOKENS)
    assert served["waits"] >= served.total() / 5 - slack
    assert served.total() == 2000 * slots


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(10, 300), min_size=2, max_size=5), st.integers(1, 8))
def test_any_two_that_always_wait_differ_by_what_is_in_their_slots(costs: list[int], slots: int) -> None:
    worker = Worker(slots)
    for number, cost in enumerate(costs):
        worker.submit(str(number), repeat(cost, 3000 * 8))
    served = worker.run(3000)
    assert spread(served, *worker.queues) <= slots * (max(costs) + QUANTUM_TOKENS)


@pytest.mark.parametrize("tenants", [2, 3, 8])
def test_equal_slots_go_to_equal_tenants(tenants: int) -> None:
    worker = Worker(tenants)
    for number in range(tenants):
        worker.submit(str(number), repeat(100, 1000))
    worker.pull()
    assert sorted(name for name, _ in worker.running) == sorted(worker.queues)
