"""The app over a real Valkey, and a stand-in for the worker that the test itself moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from flask import Flask
from flask.testing import FlaskClient
from rq.job import Job
from rq.results import Result

from shared.ask import Question, answer, next_question
from shared.connection import connect
from shared.errors import SlotlineError
from shared.jobs import JobStore
from shared.names import PRIORITIES, SERIALIZER, queue_name
from shared.records import job_object
from shared.registry import ModelCard, Registry, WorkerStats
from shared.settings import Settings, WebSettings, load
from shared.stream import Append, EventId, dumps
from shared.work import End, Pulled
from tests.processes import eventually
from webapi import create_app
from webapi.services import services_of

MODEL = "tiny"


class ScriptedWorker:
    """Does on request what a worker would do by itself."""

    def __init__(self, client: redis.Redis, settings: Settings, model: str = MODEL, name: str = "w1") -> None:
        self.store = JobStore(client, settings)
        self.registry = Registry(client)
        self.settings = settings
        self.model = model
        self.name = name

    def register(self, **fields: Any) -> ModelCard:
        """Make the model known, as a worker does at its start."""
        card: dict[str, Any] = {
            "alias": "",
            "n_ctx": 1024,
            "n_vocab": 1000,
            "max_request_tokens": 512,
            "has_chat_template": True,
            "max_queue": 0,
            "description": "a model for tests",
            "capabilities": ("completion", "chat", "json_schema", "grammar"),
        }
        found = ModelCard(name=self.model, **(card | fields))
        self.registry.register_model(found)
        return found

    def report(self, **fields: Any) -> None:
        """Be live for some seconds."""
        self.store.renew_lease(self.name, 60)
        figures: dict[str, Any] = {"n_parallel": 4, "n_batch": 512, "n_ctx": 1024, "active_slots": 1, "idle_slots": 3}
        self.registry.report(WorkerStats(worker=self.name, model=self.model, **(figures | fields)))

    def pull(self) -> Pulled:
        """Take the next job of the model's queues, or of `default`."""
        return self.pull_any()[0]

    def pull_next(self) -> Pulled:
        """Take the next job as soon as there is one."""
        return eventually(self.pull_any, "a job is queued")[0]

    def pull_any(self) -> list[Pulled]:
        """Take the next job if there is one."""
        queues = [queue_name(model, p) for p in PRIORITIES for model in (self.model, "default")]
        return self.store.pull(self.name, queues, 1)

    def started(self, job: Pulled, tokens: int = 0) -> None:
        name = "resumed" if tokens else "started"
        self._append(job, f"{tokens}-*", name, {"prompt_tokens": 3, "tokens": tokens})

    def token(self, job: Pulled, index: int, text: str, **fields: Any) -> None:
        data = {"index": index, "text": text, "token": 7 + index} | fields
        self._append(job, str(EventId.of_token(index)), "token", data)

    def _append(self, job: Pulled, at: str, name: str, data: dict[str, Any]) -> None:
        event = Append(job.record.id, job.execution, at, name, dumps(data))
        assert self.store.stream.append([event]) == []

    def finish(self, job: Pulled, text: str, tokens: int, **fields: Any) -> dict[str, Any]:
        """Commit the job's end and record it as RQ would."""
        given: dict[str, Any] = {"status": "completed", "finish_reason": "length", "ttl_s": 3600, "seed": 5}
        given |= {"ended_at": time.time(), "text": text, "usage": usage_of(tokens)} | fields
        final = job_object(job.record, **given)
        (outcome,) = self.store.commit([End(job.record.id, job.execution, final, tokens, 3600)])
        assert outcome == "ok"
        status = {"completed": "finished", "failed": "failed", "cancelled": "canceled"}[final["status"]]
        self.store.client.hset(f"rq:job:{job.record.id}", "status", status)
        return final

    def record(self, final: dict[str, Any]) -> None:
        """Store what a job has come to as its result in RQ, as a worker does after the commit."""
        job = Job(final["id"], connection=self.store.client, serializer=SERIALIZER)
        Result.create(job, Result.Type.SUCCESSFUL, ttl=3600, return_value=final)

    def fail(self, job: Pulled, error: SlotlineError, text: str = "", tokens: int = 0) -> dict[str, Any]:
        """Commit that the job has failed."""
        return self.finish(job, text, tokens, status="failed", finish_reason=None, error=error.to_dict())

    def run_all(self, texts: list[str]) -> dict[str, Any]:
        """Take a job and generate these texts, a token each."""
        return self.run(self.pull(), texts)

    def run(self, job: Pulled, texts: list[str]) -> dict[str, Any]:
        """Generate these texts for a job, a token each."""
        self.started(job)
        for index, text in enumerate(texts):
            self.token(job, index, text)
        return self.finish(job, "".join(texts), len(texts))

    @contextmanager
    def live(self) -> Iterator[list[Question]]:
        """Be live and find every request fine while the block runs; gives the list of questions."""
        self.report()
        with self.answering(lambda _: {"prompt_tokens": 3}) as asked:
            yield asked

    @contextmanager
    def serving(self, serve: Callable[[Pulled], object]) -> Iterator[list[Question]]:
        """Be live and serve each job as it comes, on a thread of its own."""
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(0.005):
                for job in self.pull_any():
                    serve(job)

        thread = threading.Thread(target=work)
        with self.live() as asked:
            thread.start()
            try:
                yield asked
            finally:
                stop.set()
                thread.join()

    @contextmanager
    def answering(self, reply: Callable[[Question], dict[str, Any]]) -> Iterator[list[Question]]:
        """Answer questions while the block runs; gives the list of those asked."""
        asked: list[Question] = []
        stop = threading.Event()
        client = connect(self.settings)

        def serve() -> None:
            while not stop.is_set():
                question = next_question(client, self.model, 0.05)
                if question is not None:
                    asked.append(question)
                    answer(client, question, _answer_to(question, reply))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            stop.set()
            thread.join()
            client.close()


def usage_of(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens, "cached_tokens": 0}


def _answer_to(question: Question, reply: Callable[[Question], dict[str, Any]]) -> dict[str, Any]:
    try:
        return reply(question)
    except SlotlineError as error:
        return {"error": error.to_dict()}


def web_settings(settings: Settings, **fields: Any) -> WebSettings:
    return load(WebSettings, {"redis_url": settings.redis_url, "keep_alive_s": 0.2, "ask_timeout_s": 1.0} | fields)


MakeApp = Callable[..., Flask]


@pytest.fixture
def make_app(client: redis.Redis, settings: Settings) -> Iterator[MakeApp]:
    """Makes apps with settings of their own; the database is empty at the start."""
    apps = []

    def make(**fields: Any) -> Flask:
        apps.append(create_app(web_settings(settings, **fields)))
        return apps[-1]

    yield make
    for app in apps:
        services_of(app).close()


@pytest.fixture
def app(make_app: MakeApp) -> Flask:
    return make_app()


@pytest.fixture
def http(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture
def worker(client: redis.Redis, settings: Settings) -> ScriptedWorker:
    """A worker whose model is known and which is not live until it reports."""
    worker = ScriptedWorker(client, settings)
    worker.register()
    return worker


@pytest.fixture
def no_worker(client: redis.Redis, settings: Settings) -> ScriptedWorker:
    """A worker that nobody has heard of yet."""
    return ScriptedWorker(client, settings)
