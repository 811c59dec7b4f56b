"""`slotline bench engine --constrained N`: ticks in which N of the jobs keep to a grammar, against ticks without one.

All slots decode in every tick that counts. Ticks of both sorts are measured in turn, round after round, in one process.
No server takes part, so the ticks are shorter than a worker's and the ratio is, if anything, too high.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count

from rich.console import Console
from rich.table import Table

from shared.settings import WorkerSettings, load
from worker.backend import Backend, ModelError, SamplingParams
from worker.batching import DecodeMaximal
from worker.bench import MODES
from worker.constraint import json_object_constraint
from worker.engine import Engine
from worker.model_process import EXIT_CONFIG, load_backend
from worker.plain_text import with_bos
from worker.requests import Ended, Event, Request

#: Every JSON object, on one line.
JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (pair ("," " "? pair)*)? "}"
pair   ::= string ":" " "? value
array  ::= "[" (value ("," " "? value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
"""

#: Ticks that may go by for each that counts: after a short answer the next one is prefilled.
_PATIENCE = 50


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: the median of the rounds' mean ticks, and of their ratios."""

    batch: int
    constrained: int
    kind: str
    mode: str
    tick_ms: float
    free_tick_ms: float
    ratio: float


def run(
    model_path: str,
    batches: Sequence[int],
    constrained: int,
    as_json: bool,
    tokens: int = 64,
    rounds: int = 5,
    threads: int = 0,
) -> int:
    """Measure and print. Returns the exit status."""
    console = Console(stderr=True)
    figures: list[Figure] = []
    try:
        for batch in batches:
            console.print(f"batch {batch}: {rounds} rounds of {tokens} ticks …", highlight=False)
            figures += _measure(model_path, batch, constrained, tokens, rounds, threads)
    except ModelError as error:
        print(f"slotline bench: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if as_json:
        print(json.dumps([asdict(figure) for figure in figures]))
    else:
        Console().print(_table(figures))
    return 0


def _measure(model_path: str, batch: int, constrained: int, tokens: int, rounds: int, threads: int) -> Iterator[Figure]:
    given = {"model_path": model_path, "n_ctx": batch * (64 + tokens), "n_parallel": batch, "threads": threads}
    backend = load_backend(load(WorkerSettings, given))
    try:
        bench = _Ticks(backend, tokens)
        for mode, params in MODES.items():
            free: list[float] = []
            kinds = {
                "response_format": replace(params, constraint=json_object_constraint()),
                "grammar": replace(params, grammar=JSON_GRAMMAR),
            }
            taken: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                free.append(bench.mean_ms([params] * batch))
                for kind, guided in kinds.items():
                    taken[kind].append(bench.mean_ms([guided] * constrained + [params] * (batch - constrained)))
            for kind, times in taken.items():
                ratio = statistics.median(t / f for t, f in zip(times, free, strict=True))
                yield Figure(
                    batch=batch,
                    constrained=constrained,
                    kind=kind,
                    mode=mode,
                    tick_ms=round(statistics.median(times), 2),
                    free_tick_ms=round(statistics.median(free), 2),
                    ratio=round(ratio, 3),
                )
    finally:
        backend.close()


class _Ticks:
    """An engine whose slots are always all at work."""

    def __init__(self, backend: Backend, tokens: int) -> None:
        self._backend = backend
        self._tokens = tokens
        self._numbers = count()

    def mean_ms(self, jobs: Sequence[SamplingParams]) -> float:
        """Mean time of the ticks in which every slot decodes; each job that ends is followed by one like it."""

        def go_on(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, Ended):
                    assert event.error is None, f"a job of the bench failed: {event.error}"
                    engine.submit(self._request(event.request.params))

        engine = Engine(self._backend, DecodeMaximal(), go_on, n_parallel=len(jobs))
        for params in jobs:
            engine.submit(self._request(params))
        times: list[float] = []
        for _ in range(_PATIENCE * self._tokens):
            done = engine.tokens, engine.prompt_tokens
            began = time.perf_counter()
            engine.tick()
            took = time.perf_counter() - began
            if (engine.tokens, engine.prompt_tokens) == (done[0] + len(jobs), done[1]):
                times.append(took)
            if len(times) == self._tokens:
                break
        else:
            raise ModelError("the answers are so short that the slots are hardly ever at work together")
        engine.hand_back(running=True)
        engine.tick()
        return statistics.mean(times) * 1000

    def _request(self, params: SamplingParams) -> Request:
        number = next(self._numbers)
        text = f"{number}. Describe a person as a JSON object with name, age, address and hobbies:\n"
        vocab = self._backend.vocab
        prompt = tuple(with_bos(vocab, vocab.tokenize(text, parse_special=False)))
        return Request(str(number), str(number), prompt, replace(params, seed=number), self._tokens)


def _table(figures: list[Figure]) -> Table:
    table = Table("batch", "under a grammar", "given as", "mode", "tick ms", "without ms", "ratio")
    for f in figures:
        table.add_row(
            str(f.batch),
            str(f.constrained),
            f.kind,
            f.mode,
            f"{f.tick_ms:.2f}",
            f"{f.free_tick_ms:.2f}",
            f"{f.ratio:.3f}",
        )
    return table
