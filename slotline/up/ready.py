"""Whether the service is ready, and what to type then."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from importlib.resources import files

import httpx

from slotline.program import program

#: A phase that lasts is named again this often.
REMIND_S = 15.0


class Readiness:
    """Asks `/readyz` and reports each phase on the way."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self._url = url
        self._say = say
        self._phase = ""
        self._phase_since = self._said_at = time.monotonic()

    def look(self) -> bool:
        """Ask once; True when everything is there."""
        phase = self._ask()
        if phase is None:
            return True
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_since, self._said_at = phase, now, now
            self._say(f"{phase} ...")
        elif now - self._said_at >= REMIND_S:
            self._said_at = now
            self._say(f"still {phase} ({now - self._phase_since:.0f} s) ...")
        return False

    def _ask(self) -> str | None:
        try:
            answer = httpx.get(f"{self._url}/readyz", timeout=2, trust_env=False)
        except httpx.TransportError:
            return "starting the web API"
        if answer.status_code == 200:
            return None
        return "waiting for Redis" if "redis_unavailable" in answer.text else "loading the model"


def room(url: str) -> str:
    """What the worker has come up with, such as ` in 16 slots, n_ctx 8192`; nothing if it is gone already."""
    try:
        workers = httpx.get(f"{url}/v1/stats", timeout=2, trust_env=False).json()["workers"]
    except (httpx.TransportError, ValueError, KeyError):
        return ""
    return f" in {workers[0]['n_parallel']} slots, n_ctx {workers[0]['n_ctx']}" if workers else ""


def commands(url: str) -> str:
    """Commands to paste into a shell: submit and poll, stream, and the same with our own."""
    name = program()
    post = f"curl -s {url}/v1/jobs -H 'Content-Type: application/json' -d"
    find_id = 'grep -o \'"id": *"[^"]*"\' | head -n 1 | cut -d \'"\' -f 4'
    body = '{"prompt": "The capital of France is", "max_tokens": 32}'
    return f"""\
Submit a job, then ask for it until it is completed:
  JOB=$({post} '{body}' | {find_id})
  curl -s {url}/v1/jobs/$JOB

Stream its tokens:
  curl -sN {url}/v1/jobs/$JOB/events

The same with the command:
  {name} submit --stream "The capital of France is"
  {name} submit --chat --wait "Write a haiku about the sea."

Run a file of prompts, a row for each:
  {name} batch run {sample()} -o answers.jsonl --max-tokens 32

Ctrl-C stops everything; jobs that are left go on next time."""


def sample() -> str:
    """Path of the small file of prompts that comes with us, as a shell reads it."""
    return shlex.quote(str(files("slotline.batch") / "sample.jsonl"))
