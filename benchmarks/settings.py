"""What settings of llama.cpp cost: the same passes with each of them, in turn, in one process.

    python -m benchmarks.settings --seconds 120 plain split:kv_unified=off
    python -m benchmarks.settings --seconds 120 plain full:held=14000 full_off:held=14000,flash_attn=off
    python -m benchmarks.settings --seconds 120 plain small:n_ubatch=128 middle:n_ubatch=256
    python -m benchmarks.settings --seconds 120 --wall two:threads=2 one:threads=1 four:threads=4

A variant is `name:setting=value,…` with settings of `slotline worker`; `held` is how many cells other sequences hold.
Printed are the medians of the rounds and of their ratios to the first variant: CPU time of the thread that computes,
with one thread each (so that a busy machine matters little), or the time on the clock with `--wall`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.settings import WorkerSettings, load
from worker.backend import BatchItem, DecodeOutcome
from worker.demo import demo_model_path
from worker.llama_backend import LlamaBackend

SLOTS, HELD_AT_ONCE = 8, 2000


@dataclass
class Variant:
    """A loaded model with some settings."""

    name: str
    backend: LlamaBackend
    tokens: list[list[int]]

    def run(self, *items: BatchItem) -> None:
        """One pass."""
        outcome = self.backend.decode(items)
        assert outcome is DecodeOutcome.DONE, outcome.value

    def hold(self, cells: int) -> None:
        """Let sequences beyond the slots hold cells."""
        for number, start in enumerate(range(0, cells, HELD_AT_ONCE)):
            size = min(HELD_AT_ONCE, cells - start)
            for at in range(0, size, 500):
                part = self.tokens[number % SLOTS][: min(500, size - at)]
                self.run(BatchItem(SLOTS + number, at, part, False))

    def fill(self, slots: int, depth: int) -> None:
        """Put `depth` tokens in each of the first slots, and nothing in the others."""
        for seq_id in range(SLOTS):
            self.backend.clear(seq_id)
        for seq_id in range(slots):
            self.run(BatchItem(seq_id, 0, self.tokens[seq_id][:depth], False))

    def decode(self, slots: int, at: int) -> None:
        """A token of each slot."""
        self.run(*(BatchItem(seq_id, at, [5], True) for seq_id in range(slots)))


def measured(variant: Variant, clock: Callable[[], float]) -> dict[str, float]:
    """Milliseconds of each kind of pass."""
    ms: dict[str, float] = {}
    for slots in (1, SLOTS):
        variant.fill(slots, 64)
        variant.decode(slots, 64)
        began = clock()
        for at in range(65, 69):
            variant.decode(slots, at)
        ms[f"decode of {slots}"] = (clock() - began) / 4 * 1000
    variant.fill(0, 0)
    began = clock()
    variant.run(BatchItem(0, 0, variant.tokens[0][:512], True))
    ms["prefill of 512"] = (clock() - began) * 1000
    variant.fill(SLOTS - 1, 64)
    began = clock()
    decoding = [BatchItem(seq_id, 64, [5], True) for seq_id in range(SLOTS - 1)]
    variant.run(*decoding, BatchItem(SLOTS - 1, 0, variant.tokens[0][:256], True))
    ms[f"decode of {SLOTS - 1} with prefill of 256"] = (clock() - began) * 1000
    return ms


def opened(text: str, model: str) -> Variant:
    """Load a variant."""
    name, _, given = text.partition(":")
    said: dict[str, Any] = dict(pair.split("=") for pair in given.split(",") if pair)
    held = int(said.pop("held", 0))
    defaults = {"model_path": model, "n_ctx": 16_384, "n_parallel": SLOTS, "threads": 1, "cached_prefixes": 16}
    tokens = np.random.default_rng(0).integers(100, 20_000, (SLOTS, 512)).tolist()
    variant = Variant(name, LlamaBackend(load(WorkerSettings, defaults | said)), tokens)
    variant.hold(held)
    return variant


def main() -> None:
    """Measure in turn until the time is over, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="NAME:SETTING=VALUE,…")
    parser.add_argument("--model", default=None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--wall", action="store_true", help="Time on the clock, for comparing threads.")
    given = parser.parse_args()
    clock = time.perf_counter if given.wall else time.thread_time
    variants = [opened(text, given.model or str(demo_model_path())) for text in given.variants]
    rounds: list[dict[str, dict[str, float]]] = []
    deadline = time.monotonic() + given.seconds
    while not rounds or time.monotonic() < deadline:
        turn = len(rounds) % len(variants)
        rounds.append({v.name: measured(v, clock) for v in [*variants[turn:], *variants[:turn]]})
    first = variants[0].name
    for kind in rounds[0][first]:
        for variant in variants:
            ms = statistics.median(r[variant.name][kind] for r in rounds)
            ratio = statistics.median(r[variant.name][kind] / r[first][kind] for r in rounds)
            print(f"{kind:32} {variant.name:12} {ms:9.1f} ms  {ratio:6.3f}  ({len(rounds)} rounds)")
    for variant in variants:
        variant.backend.close()


if __name__ == "__main__":
    main()
