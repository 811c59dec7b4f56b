"""Drives an OpenAI-style server with many callers and prints one JSON line of figures.

    python -m benchmarks.load http://127.0.0.1:8000 --concurrency 8 --requests 32 --max-tokens 64

Each caller sends its next request when its last one is answered. No two prompts begin alike unless asked for, and the
same options always send the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.client import Answer, CallFailed, complete

STOCK = (
    "river stone window garden winter letter market engine forest island paper silver morning bridge shadow kitchen "
    "harbour music travel number evening copper valley signal lantern village summer circle doctor teacher station "
    "picture history question answer country mountain weather science machine"
)
WORDS = STOCK.split()


@dataclass(slots=True)
class Figures:
    """What was measured over all calls."""

    wall_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Tokens and requests a second, percentiles in milliseconds."""
        generated = sum(answer.generated_tokens for answer in self.answers)
        ttft_ms = [answer.ttft_s * 1e3 for answer in self.answers]
        itl_ms = [gap * 1e3 for answer in self.answers for gap in answer.gap_s]
        return {
            "reqs": len(self.answers) + len(self.errors),
            "gen_tok_s": round(generated / self.wall_s, 1),
            "req_s": round(len(self.answers) / self.wall_s, 2),
            "wall_s": round(self.wall_s, 2),
            "ttft_p50": percentile(ttft_ms, 50),
            "ttft_p99": percentile(ttft_ms, 99),
            "itl_p50": percentile(itl_ms, 50),
            "itl_p99": percentile(itl_ms, 99),
            "gen": generated,
            "prompt": sum(answer.prompt_tokens for answer in self.answers),
            "cached": sum(answer.cached_tokens for answer in self.answers),
            "errors": len(self.errors),
            "first_error": self.errors[:1],
        }


def percentile(values: list[float], percent: int) -> float | None:
    """The value that so many percent are below; None of nothing."""
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, len(ranked) * percent // 100)], 1) if ranked else None


def words(rng: random.Random, count: int) -> str:
    """So many words, about one token each."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def bodies(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The requests that the options mean."""
    rng, lengths = random.Random(options.prompt_seed), random.Random(options.seed)
    prefix = words(rng, options.shared_prefix)
    for number in range(options.requests):
        prompt = f"{prefix} Story {number}: {words(rng, options.prompt_tokens)}".lstrip()
        length = max(1, int(options.max_tokens * lengths.uniform(0.25, 1.75))) if options.vary else options.max_tokens
        asked = {"messages": [{"role": "user", "content": prompt}]} if options.chat else {"prompt": prompt}
        yield asked | {
            "model": "default",
            "max_tokens": length,
            "temperature": options.temperature,
            "seed": options.seed,
            "ignore_eos": options.ignore_eos,
        }


async def drive(base_url: str, requests: Iterator[dict[str, Any]], concurrency: int) -> Figures:
    """Send all requests, so many at once; a call that fails is counted and the others go on."""
    figures = Figures()

    async def caller() -> None:
        for body in requests:
            try:
                figures.answers.append(await complete(base_url, body))
            except (CallFailed, OSError, asyncio.IncompleteReadError) as error:
                figures.errors.append(f"{type(error).__name__}: {error}")

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    figures.wall_s = time.perf_counter() - began
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Drive an OpenAI-style server.")
    parser.add_argument("base_url")
    parser.add_argument("--concurrency", type=int, default=8, help="callers at once")
    parser.add_argument("--requests", type=int, default=32, help="requests in all")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of each")
    parser.add_argument("--vary", action="store_true", help="new tokens from 0.25 to 1.75 times as many")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="words of each prompt's own")
    parser.add_argument("--shared-prefix", type=int, default=0, help="words that all prompts begin with")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompt-seed", type=int, default=7, help="other words for another number")
    parser.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    parser.add_argument("--ignore-eos", action="store_true", help="never end before --max-tokens")
    options = parser.parse_args()
    figures = asyncio.run(drive(options.base_url.rstrip("/"), bodies(options), options.concurrency))
    print(json.dumps(figures.summary()))


if __name__ == "__main__":
    main()
