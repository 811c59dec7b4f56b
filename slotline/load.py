"""Drives a running server with many jobs at once and measures what its callers see.

Times are taken where a caller would take them: from the moment a job is sent until its events arrive here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import httpx

from slotline import __version__
from slotline.answers import api_error
from slotline.sse import SseEvent, SseParser

WORDS = (
    "river stone window garden winter letter market engine forest island paper silver morning bridge shadow",
    "kitchen harbour music travel number evening copper valley signal lantern village",
)

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `requests` jobs, `concurrency` of them at once, each with a prompt of its own."""

    concurrency: int
    requests: int
    max_tokens: int
    prompt_tokens: int
    temperature: float = 0.0
    model: str | None = None


@dataclass(slots=True)
class Figures:
    """What was measured. Times in seconds; the gaps are those between the tokens of one job."""

    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The figures as one JSON-ready object, times in milliseconds."""
        done, wall_s = len(self.total_s), self.wall_s or math.inf
        return {
            "requests": done + len(self.errors),
            "failed": len(self.errors),
            "wall_s": round(self.wall_s, 3),
            "requests_per_s": round(done / wall_s, 2),
            "generated_tokens": self.generated_tokens,
            "generated_tokens_per_s": round(self.generated_tokens / wall_s, 1),
            "prompt_tokens": self.prompt_tokens,
            "ttft_ms": percentiles(self.ttft_s),
            "inter_token_ms": percentiles(self.gap_s),
            "total_ms": percentiles(self.total_s),
            "first_error": self.errors[0] if self.errors else None,
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """The nearest-rank percentiles in milliseconds; None for each where there is nothing."""
    ranked = sorted(seconds)

    def at(percent: int) -> float | None:
        rank = max(1, math.ceil(percent / 100 * len(ranked)))
        return round(ranked[rank - 1] * 1e3, 2) if ranked else None

    return {f"p{percent}": at(percent) for percent in PERCENTILES}


async def drive(base_url: str, load: Load) -> Figures:
    """Send the load and return the figures. A job that fails is one of `errors`; the others go on.

    Raises:
        httpx.TransportError: the server cannot be reached at all.
    """
    figures = Figures()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency)
    headers = {"User-Agent": f"slotline/{__version__} bench"}
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, limits=limits, timeout=httpx.Timeout(600, connect=10), trust_env=False
    ) as client:
        await client.get("/healthz")
        todo = _bodies(load)
        began = time.perf_counter()
        await asyncio.gather(*(_caller(client, todo, figures) for _ in range(load.concurrency)))
        figures.wall_s = time.perf_counter() - began
    return figures


async def _caller(client: httpx.AsyncClient, todo: Iterator[dict[str, Any]], figures: Figures) -> None:
    for body in todo:
        try:
            await _one(client, body, figures)
        except (httpx.HTTPError, _Failed, ValueError, KeyError) as error:
            figures.errors.append(f"{type(error).__name__.lstrip('_')}: {error}")


async def _one(client: httpx.AsyncClient, body: dict[str, Any], figures: Figures) -> None:
    """One job from its submit to its last event."""
    began = last = time.perf_counter()
    accepted = await client.post("/v1/jobs", json=body)
    if not accepted.is_success:
        raise _Failed(str(api_error(accepted)))
    first = True
    async with client.stream("GET", f"/v1/jobs/{accepted.json()['id']}/events") as events:
        parser = SseParser()
        async for chunk in events.aiter_bytes():
            now = time.perf_counter()
            for event in parser.feed(chunk):
                if event.name == "token":
                    (figures.ttft_s if first else figures.gap_s).append(now - (began if first else last))
                    first, last = False, now
                elif event.name in ("done", "failed"):
                    _count(event, figures)
                    figures.total_s.append(now - began)
                    return
    raise _Failed("the event stream ended before the job did")


def _count(event: SseEvent, figures: Figures) -> None:
    job = event.json()
    if job["status"] != "completed":
        raise _Failed(f"the job ended {job['status']}: {(job.get('error') or {}).get('message')}")
    figures.prompt_tokens += job["usage"]["prompt_tokens"]
    figures.generated_tokens += job["usage"]["completion_tokens"]


def _bodies(load: Load) -> Iterator[dict[str, Any]]:
    """The jobs. No two prompts begin alike, so that no prefix is shared; a word is about one token."""
    stock = " ".join(WORDS).split()
    for number in range(load.requests):
        words = (stock[(number * 7 + place * (number % 5 + 1)) % len(stock)] for place in range(load.prompt_tokens))
        yield {
            "prompt": " ".join([f"{number}", *islice(words, max(0, load.prompt_tokens - 1))]),
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "ignore_eos": True,
            "stream": True,
            **({"model": load.model} if load.model else {}),
        }


class _Failed(Exception):
    """A job that did not complete."""
