"""`slotline bench batch`: a batch run against the engine alone, on the same requests, in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slotline.batch.embedded import EmbeddedRunner, worker_settings
from slotline.batch.failures import FailureLimit
from slotline.batch.index import LineIndex
from slotline.batch.lines import JOBS, Line
from slotline.batch.runner import LINES_PER_SLOT
from slotline.batch.running import Run, Tally
from slotline.batch.writing import Output
from slotline.load import WORDS


@dataclass(frozen=True, slots=True)
class Work:
    """What is run: so many lines, in so many rounds, each of about `prompt_tokens` and exactly `max_tokens` tokens."""

    lines: int
    rounds: int
    slots: int
    prompt_tokens: int
    max_tokens: int
    temperature: float

    def prompts(self, number: int) -> list[str]:
        """The prompts of one round. No two begin alike, so that no prefix is shared; a word is about one token."""
        stock = " ".join(WORDS).split()
        share = self.lines // self.rounds
        return [
            " ".join([f"{line}", *islice(_words(stock, line), max(0, self.prompt_tokens - 2))])
            for line in range(number * share, (number + 1) * share)
        ]


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second of both, and the ratio: the median of the rounds' ratios."""

    lines: int
    slots: int
    engine_tok_s: float
    batch_tok_s: float
    ratio: float
    ratios: list[float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(model_path: str, work: Work, say: Callable[[str], None]) -> Figures:
    """Measure both, round after round, so that a machine which is slower for a while slows both.

    Raises:
        RunnerLost, ModelError: the model cannot be run.
    """
    from worker.bench_batch import EngineAlone

    settings = worker_settings(model_path, work.slots)
    engine_s: list[float] = []
    batch_s: list[float] = []
    tokens = 0
    with closing(EngineAlone(settings)) as engine, closing(EmbeddedRunner(model_path, work.slots, say)) as runner:
        engine.run(work.prompts(0)[: work.slots], 4, work.temperature)  # the first pass allocates
        _batch(runner, work, work.prompts(0)[: work.slots], 4, work.lines)
        for number in range(work.rounds):
            prompts = work.prompts(number)
            # In turns, so that neither is always the one that comes first.
            for which in ("engine", "batch") if number % 2 == 0 else ("batch", "engine"):
                if which == "engine":
                    took_s, tokens = engine.run(prompts, work.max_tokens, work.temperature)
                    engine_s.append(took_s)
                else:
                    first = number * len(prompts)
                    batch_s.append(_batch(runner, work, prompts, work.max_tokens, first))
            say(f"round {number + 1}: engine {tokens / engine_s[-1]:.1f} tok/s, batch {tokens / batch_s[-1]:.1f} tok/s")
    ratios = [e / b for e, b in zip(engine_s, batch_s, strict=True)]
    return Figures(
        lines=work.lines,
        slots=work.slots,
        engine_tok_s=round(tokens * work.rounds / sum(engine_s), 1),
        batch_tok_s=round(tokens * work.rounds / sum(batch_s), 1),
        ratio=round(statistics.median(ratios), 3),
        ratios=[round(ratio, 3) for ratio in ratios],
    )


def _batch(runner: EmbeddedRunner, work: Work, prompts: list[str], max_tokens: int, before: int) -> float:
    """Seconds from the first line read to the last row on disk; lines are numbered from behind `before`."""
    options = {"max_tokens": max_tokens, "temperature": work.temperature, "ignore_eos": True}
    lines = (
        Line(number, {"prompt": prompt}, JOBS, {"prompt": prompt, "seed": number, **options})
        for number, prompt in enumerate(prompts, before + 1)
    )
    with tempfile.TemporaryDirectory() as folder, LineIndex() as index:
        output = Output(str(Path(folder) / "out.jsonl"), None, "finished", index)
        began = time.perf_counter()
        with output:
            run = Run(
                lines,
                runner,
                output,
                window=LINES_PER_SLOT * runner.slots,
                limit=FailureLimit(count=0),
                name="bench",
                watcher=_Nobody(),
            )
            run.run()
        took_s = time.perf_counter() - began
    assert run.tally.ended == len(prompts), f"a line of the bench failed: {run.tally.first_error}"
    return took_s


class _Nobody:
    """Watches nothing."""

    def look(self, tally: Tally, trouble: str | None) -> None:
        """See `Watcher`."""


def _words(stock: list[str], line: int) -> Iterator[str]:
    for place in range(10_000):
        yield stock[(line * 7 + place * (line % 5 + 1)) % len(stock)]
