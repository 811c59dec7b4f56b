"""Batch jobs fill every slot, prefilling and decoding; then interactive calls come. What does it cost either side?

Two stretches of the same length are measured: batch jobs alone, and the same with an interactive call every so often.
Both kinds have four prompt tokens to each new one, so that a token of one is as much work as a token of the other:
what all of them together make less in the second stretch is what the changing of places has cost.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from contextlib import suppress
from typing import Any

from benchmarks.client import Answer, complete
from benchmarks.load import words

BATCH_CALLERS = 16
BATCH_WORDS, BATCH_TOKENS = 192, 48
CALL_WORDS, CALL_TOKENS = 32, 8
#: All batch callers are under way after so long.
LEAD_S = 3.0
STRETCH_S = 12.0
#: Between two interactive calls.
PAUSE_S = 1.0
IDLE_CALLS = 5


def preempt(base_url: str, seed: int) -> dict[str, Any]:
    """Milliseconds to the first token of an idle worker and of a busy one; percent of the tokens lost."""
    return asyncio.run(_measure(base_url, random.Random(seed)))


async def _measure(base_url: str, rng: random.Random) -> dict[str, Any]:
    idle = [await _call(base_url, rng, Answer()) for _ in range(IDLE_CALLS)]
    alone, _ = await _stretch(base_url, rng, with_calls=False)
    beside, busy = await _stretch(base_url, rng, with_calls=True)
    if not busy:
        raise RuntimeError(f"no interactive call was answered within {STRETCH_S:g} s")
    return {
        "idle_ttft": _median_ms(idle),
        "busy_ttft": _median_ms(busy),
        "busy_ttft_worst": round(max(call.ttft_s for call in busy) * 1e3, 1),
        "tok_s_alone": round(alone / STRETCH_S, 1),
        "tok_s_beside": round(beside / STRETCH_S, 1),
        "lost": round((1 - beside / alone) * 100, 1),
    }


async def _stretch(base_url: str, rng: random.Random, with_calls: bool) -> tuple[int, list[Answer]]:
    """New tokens of all jobs within `STRETCH_S`, and the interactive calls."""
    answers: list[Answer] = []
    calls: list[Answer] = []

    async def batch() -> None:
        while True:
            answers.append(Answer())
            await complete(base_url, _body(rng, BATCH_WORDS, BATCH_TOKENS, "batch"), answers[-1])

    async def interactive() -> None:
        while True:
            answers.append(Answer())
            calls.append(await _call(base_url, rng, answers[-1]))
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(batch()) for _ in range(BATCH_CALLERS)]
    await asyncio.sleep(LEAD_S)
    before = sum(answer.chunks for answer in answers)
    tasks += [asyncio.create_task(interactive())] if with_calls else []
    await asyncio.wait(tasks, timeout=STRETCH_S, return_when=asyncio.FIRST_EXCEPTION)
    made = sum(answer.chunks for answer in answers) - before
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return made, calls


async def _call(base_url: str, rng: random.Random, answer: Answer) -> Answer:
    return await complete(base_url, _body(rng, CALL_WORDS, CALL_TOKENS, "interactive"), answer)


def _median_ms(calls: list[Answer]) -> float:
    return round(statistics.median(call.ttft_s for call in calls) * 1e3, 1)


def _body(rng: random.Random, prompt: int, tokens: int, priority: str) -> dict[str, Any]:
    return {
        "model": "default",
        "prompt": f"{rng.randrange(10**9)} {words(rng, prompt)}",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "priority": priority,
    }
