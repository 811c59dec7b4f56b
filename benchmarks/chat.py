"""A chat of several turns, each with all that was said before."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks.client import complete
from benchmarks.load import words

TURNS = 6
#: Words that a user says in a turn, and tokens that are answered.
SAID, ANSWERED = 48, 32


def chat_turns(base_url: str, seed: int) -> dict[str, Any]:
    """Hold a chat that nobody held before. Returns the milliseconds to the first token of each turn and of the last."""
    return asyncio.run(_hold(base_url, random.Random(seed)))


async def _hold(base_url: str, rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, str]] = []
    ttft_ms: list[float] = []
    cached: list[int] = []
    began = time.perf_counter()
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(rng, SAID)})
        body = {"messages": messages, "max_tokens": ANSWERED, "temperature": 0, "ignore_eos": True, "model": "default"}
        answer = await complete(base_url, body)
        messages.append({"role": "assistant", "content": answer.text})
        ttft_ms.append(round(answer.ttft_s * 1e3, 1))
        cached.append(answer.cached_tokens)
    wall_s = time.perf_counter() - began
    return {"ttft": ttft_ms[-1], "turns": ttft_ms, "cached": cached, "wall_s": round(wall_s, 2)}
