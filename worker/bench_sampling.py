"""`slotline bench sampling`: choosing the tokens of a tick on one thread, and on two with half of the rows each.

The rows are random and read anew each time, as after a pass. Both are measured in turn, round after round.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from worker.backend import Logits
from worker.bench import MODES
from worker.sampler import best_of_rows
from worker.token_choice import TokenChooser

Choose = Callable[[Logits], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: medians of the rounds, and of their ratios."""

    rows: int
    mode: str
    one_thread_ms: float
    two_threads_ms: float
    ratio: float


def run(sizes: Sequence[int], vocabulary: int, rounds: int, as_json: bool) -> None:
    """Measure and print."""
    chooser = TokenChooser(MODES["sampled"])
    modes: dict[str, Choose] = {
        "greedy": best_of_rows,
        # As the engine does: it looks for the best of all rows first, which finds rows that are no numbers.
        "sampled": lambda rows: (best_of_rows(rows), [chooser.choose(row, 0) for row in rows]),
    }
    figures = []
    with ThreadPoolExecutor(1) as other:
        for size in sizes:
            rows = np.random.default_rng(size).normal(0, 3, (size, vocabulary)).astype(np.float32)
            figures += [_measure(mode, choose, rows, rounds, other) for mode, choose in modes.items()]
    if as_json:
        print(json.dumps([asdict(figure) for figure in figures]))
    else:
        Console().print(_table(figures))


def _measure(mode: str, choose: Choose, rows: Logits, rounds: int, other: ThreadPoolExecutor) -> Figure:
    half = len(rows) // 2

    def by_two() -> None:
        first = other.submit(choose, rows[:half])
        choose(rows[half:])
        first.result()

    pairs = [(_ms(lambda: choose(rows)), _ms(by_two)) for _ in range(rounds)]
    one, two = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return Figure(len(rows), mode, round(one, 2), round(two, 2), round(ratio, 2))


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def _table(figures: Sequence[Figure]) -> Table:
    table = Table("rows", "mode", "one thread ms", "two threads ms", "ratio")
    for f in figures:
        table.add_row(str(f.rows), f.mode, f"{f.one_thread_ms:.2f}", f"{f.two_threads_ms:.2f}", f"{f.ratio:.2f}")
    return table
