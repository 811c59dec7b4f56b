"""Whatever interrupts a job, wherever it does: log and end are those of the job that nobody interrupted.

The parts of a worker are driven by hand over a real server, write by write, so that every moment can be the last.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError
from rq.worker import SimpleWorker

from shared.jobs import JobStore
from shared.names import SERIALIZER, job_key, lease_key, queue_name
from shared.reading import answer_so_far
from shared.schemas import JobRequest
from shared.settings import WorkerSettings, load
from tests.worker.engine_harness import saying
from worker.backend import DecodeOutcome, SamplingParams
from worker.batching import load_strategy
from worker.engine import Engine
from worker.fake_backend import FakeBackend
from worker.fake_scripts import FakeVocab
from worker.finaliser import Finaliser
from worker.held import HeldJob, hold
from worker.intake import Intake
from worker.preparing import Preparer
from worker.publisher import Publisher
from worker.requests import Ended, Event, Request, Token

N_SLOTS = 2
QUEUE = queue_name("m", "normal")
TEMPLATES = Path(__file__).parent / "templates"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": WEATHER}}]
ASK = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Å{\\"}"}}\n</tool_call>'
HOT = {"temperature": 0.9, "seed": 3, "top_k": 20}

#: What the model would say, the template of the worker, and the request.
CASES: dict[str, tuple[Any, str | None, dict[str, Any]]] = {
    "sampled": ("babble", None, {"prompt": "x", "max_tokens": 12, **HOT}),
    "penalties": (
        "babble",
        None,
        {"prompt": "x", "max_tokens": 12, "repeat_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {"358": 4}},
    ),
    "characters of many tokens": ("echo", None, {"prompt": "é😀日x", "max_tokens": 40}),
    "half a character at the end": ("echo", None, {"prompt": "a😀", "max_tokens": 3, "logprobs": 1}),
    "stop string": ("count", None, {"prompt": "x", "max_tokens": 30, "stop": ["4 5 X", "6 7"]}),
    "text held back for a stop string": ("count", None, {"prompt": "x", "max_tokens": 8, "stop": ["3 4 X"]}),
    "logprobs": ("babble", None, {"prompt": "x", "max_tokens": 6, "logprobs": 3, **HOT}),
    "grammar": ("babble", None, {"prompt": "x", "max_tokens": 20, "grammar": 'root ::= "one two"', "logprobs": 0}),
    "schema": (
        "babble",
        None,
        {
            "prompt": "x",
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}},
            **HOT,
        },
    ),
    "reasoning and calls": (
        saying(f"<think>\nwhy é </think>\n\nSo: {CALL}\n{CALL}"),
        "qwen3",
        {"messages": ASK, "tools": TOOLS, "max_tokens": 300, "logprobs": 1},
    ),
    "unclosed reasoning": (saying("<think>why </thi"), "qwen3", {"messages": ASK, "max_tokens": 40}),
    "a call cut short": (saying(CALL), "hermes", {"messages": ASK, "tools": TOOLS, "max_tokens": 50}),
    "a call that is none": (saying('<tool_call>{"x": 1} </tool'), "hermes", {"messages": ASK, "tools": TOOLS}),
    "a list of calls": (
        saying('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "x", '),
        "mistral_nemo",
        {"messages": ASK, "tools": TOOLS, "max_tokens": 200},
    ),
    "a bare call": (
        saying('{"parameters": {"city": "日"}, "name": "weather"} '),
        "llama31",
        {"messages": ASK, "tools": TOOLS, "max_tokens": 200},
    ),
    "a required call": (
        "babble",
        "qwen3",
        {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300, **HOT},
    ),
}


@cache
def intake_of(template: str | None) -> tuple[WorkerSettings, FakeVocab, Intake]:
    """Made once: to find out what a template can do takes a tenth of a second."""
    flags: dict[str, Any] = {"model_path": "fake:echo", "redis_url": "redis://unused"}
    if template is not None:
        flags["chat_template"] = str(TEMPLATES / f"{template}.jinja")
    settings, backend = load(WorkerSettings, flags), FakeBackend()
    return settings, backend.vocab, Intake(settings, backend.info, backend.vocab)


class Worker:
    """One life of a worker, until it is thrown away. Its threads do not run; `step` does their work."""

    def __init__(self, name: str, store: JobStore, script: Any, template: str | None) -> None:
        self.name = name
        self.store = store
        self.settings, vocab, intake = intake_of(template)
        self.backend = FakeBackend(script)
        self.backend.vocab = vocab
        self.held: dict[str, HeldJob] = {}
        self.ended = False
        self.said: list[Event] = []
        self.engine = Engine(
            self.backend, load_strategy("decode_maximal"), self.said.extend, n_parallel=N_SLOTS, pause_s=-1.0
        )
        rq = SimpleWorker([QUEUE], name=name, connection=store.client, serializer=SERIALIZER)
        self.finaliser = Finaliser(rq, store, lambda execution: self.held.pop(execution, None))
        self.publisher = Publisher(store, self.held, self.finaliser, self._lost)
        self.preparer = Preparer(intake, store, self.engine, self.said.extend, threading.Event())
        store.renew_lease(name, 60)

    def _lost(self, execution: str) -> None:
        raise AssertionError(f"{execution} has another owner")

    def pull(self) -> None:
        held = hold(self.store.pull(self.name, [QUEUE], 1), self.store.client, self.name, self.settings)
        for h in held:
            self.held[h.execution.id] = h
        self.preparer.put(held)
        self.preparer.put(None)  # type: ignore[arg-type]
        self.preparer._run()

    def say(self) -> list[Event]:
        """One tick, and what it says of the job."""
        self.engine.tick()
        self.engine.check_integrity()
        events = [e for e in self.said if e.request.id == "job"]
        self.said.clear()
        return events

    def step(self, writes: int | None = None) -> int:
        """One tick; only so many of the writes are done that it asks for. Returns how many there were."""
        events = self.say()
        # What was held back is one write with the end.
        tail = len(events) > 1 and isinstance(events[-2], Token) and events[-2].token is None
        end = len(events) - 1 - tail
        groups = [[e] for e in events[:end]] + [events[end:]] if events else []
        for group in groups[:writes]:
            self.publisher._insist(group)
            while not self.finaliser._queue.empty():
                self.finaliser._record(self.finaliser._queue.get() or [])
        assert self.publisher._writer.settle() == []
        if any(isinstance(e, Ended) for e in events):
            last = self.store.stream.last("job")
            self.ended = last is not None and last.is_terminal
        return len(groups)

    def close(self) -> None:
        self.publisher._writer.close()
        self.finaliser._callbacks.shutdown()


class Life:
    """A job, and the workers that come and go while it runs."""

    def __init__(self, store: JobStore, case: str) -> None:
        store.client.flushall()
        self.script, self.template, body = CASES[case]
        self.store = store
        self.workers = 0
        store.submit(JobRequest.model_validate({"id": "job", "retries": 1, "temperature": 0, "seed": 1, **body}), "m")
        store.client.hset(job_key("job"), "retries_left", 1000)
        self.worker = self._new()

    def _new(self) -> Worker:
        self.workers += 1
        worker = Worker(f"w{self.workers}", self.store, self.script, self.template)
        worker.pull()
        return worker

    def kill(self) -> None:
        """What the worker had not written is lost; another one takes over."""
        self.worker.close()
        self.store.client.delete(lease_key(self.worker.name))
        self.store.reclaim("reclaimer")
        self.worker = self._new()

    def hand_back(self) -> None:
        self.worker.engine.hand_back(running=True)
        self.worker.step()
        if not self.worker.ended:
            self.worker.pull()

    def fail(self) -> None:
        """A failed pass, after which RQ tries the job again."""
        self.worker.backend.outcomes.append(DecodeOutcome.FAILED)
        self.worker.step()
        if not self.worker.ended:
            self.worker.pull()

    def pause(self) -> None:
        """The cache is full, and an older request keeps its place."""
        engine = self.worker.engine
        if all(slot.request and slot.request.id == "job" for slot in engine.pool.active):
            self._let_an_older_one_in()
        self.worker.backend.outcomes.append(DecodeOutcome.NO_ROOM)
        self.worker.step()

    def _let_an_older_one_in(self) -> None:
        engine = self.worker.engine
        engine.submit(Request("older", "e-older", (1,), SamplingParams(ignore_eos=True), 100))
        engine.tick()
        slot = next(s for s in engine.pool.active if s.request and s.request.id == "older")
        slot.admitted = -1

    def displace(self) -> None:
        """More urgent requests take all slots for one token."""
        self.worker.engine._pause_s = 60.0
        self._send_urgent(1)
        self.worker.step()
        assert [r.id for r in self.worker.engine.waiting] == ["job"]

    def let_go(self) -> None:
        """More urgent requests keep all slots for too long."""
        self._send_urgent(1000)
        self.worker.step()
        if not self.worker.ended:
            assert not self.worker.held
            for n in range(N_SLOTS):
                self.worker.engine.cancel(f"e-urgent{n}")
            self.worker.pull()

    def _send_urgent(self, tokens: int) -> None:
        for n in range(N_SLOTS):
            params = SamplingParams(ignore_eos=True)
            self.worker.engine.submit(Request(f"urgent{n}", f"e-urgent{n}", (1,), params, tokens, priority=0))

    def finish(self) -> dict[str, Any]:
        for _ in range(1000):
            if self.worker.ended:
                break
            self.worker.step()
        self.worker.close()
        return self.story()

    def story(self) -> dict[str, Any]:
        """The log's tokens and the end, without times and what belongs to one attempt."""
        log = list(self.store.stream.replay("job"))
        tokens = [e.json() for e in log if e.name == "token"]
        assert [t["index"] for t in tokens] == list(range(len(tokens)))
        assert [e.index for e in log if e.name == "token"] == list(range(len(tokens)))
        assert [e.name for e in log].count("started") == 1
        final = log[-1].json()
        assert log[-1].is_terminal and sum(e.is_terminal for e in log) == 1
        answer = answer_so_far(tokens)
        assert {name: final[name] for name in answer} == answer
        assert final == self.store.view("job")
        kept = ("status", "text", "reasoning_content", "tool_calls", "logprobs", "finish_reason", "error", "seed")
        usage = {name: final["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return {"tokens": tokens, "usage": usage, **{name: final[name] for name in kept}}


def uninterrupted(store: JobStore, case: str) -> dict[str, Any]:
    return Life(store, case).finish()


WAYS = ("kill", "hand_back", "fail", "pause", "displace", "let_go")


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_what_its_name_says(case: str, store: JobStore) -> None:
    story = uninterrupted(store, case)
    assert story["status"] == "completed" and len(story["tokens"]) > 2
    assert ("reasoning" in case) <= bool(story["reasoning_content"])
    assert ("call" in case and not case.endswith("none")) == bool(story["tool_calls"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_an_interruption_after_every_token_changes_nothing(case: str, way: str, store: JobStore) -> None:
    whole = uninterrupted(store, case)
    life = Life(store, case)
    for _ in whole["tokens"]:
        life.worker.step()
        if life.worker.ended:
            break
        getattr(life, way)()
        if life.worker.ended:
            break
    assert life.finish() == whole


@pytest.mark.parametrize("way", WAYS)
def test_an_interruption_before_the_first_token_is_one_start_and_one_resumption(
    way: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "long", ("count", None, {"prompt": "w" * 1800, "max_tokens": 3}))
    whole = uninterrupted(store, "long")
    life = Life(store, "long")
    life.worker.step()
    assert life.store.stream.tokens("job") == [] and not life.worker.ended
    getattr(life, way)()
    assert life.finish() == whole
    names = [e.name for e in store.stream.replay("job") if e.name in ("started", "resumed", "token", "done")]
    assert names == ["started", "resumed", "token", "token", "token", "done"]


@pytest.mark.parametrize("case", CASES)
def test_a_kill_between_any_two_writes_changes_nothing(case: str, store: JobStore) -> None:
    whole = uninterrupted(store, case)
    n = len(whole["tokens"])
    # The first and last writes all, of those between some.
    for moment in sorted({0, 1, 2, *range(3, n, max(1, n // 12)), n - 1, n, n + 1}):
        life, written = Life(store, case), 0
        while not life.worker.ended and written < moment:
            written += life.worker.step(moment - written)
        if not life.worker.ended:
            life.kill()
        assert life.finish() == whole, f"killed after write {moment}"


def test_an_end_that_is_lost_before_its_commit_leaves_nothing_behind(store: JobStore) -> None:
    """Held back text in the log would take the place of the next token of an answer that goes on after all."""
    whole = uninterrupted(store, "stop string")
    life = Life(store, "stop string")
    while not any(t["text"].endswith("3") for t in store.stream.tokens("job")):
        life.worker.step()
    life.worker.step()
    life.worker.step()
    worker = life.worker
    worker.engine.cancel(next(iter(worker.held)))

    def away(ends: Any) -> Any:
        worker.publisher._abandon.set()
        raise ConnectionError("away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "commit", away)
        worker.publisher._insist(worker.say())
    life.kill()
    assert life.finish() == whole
