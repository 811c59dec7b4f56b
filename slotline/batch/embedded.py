"""Runs lines with a worker of our own, fed directly: no web API in between."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slotline.batch.lines import JOBS, Line
from slotline.batch.processes import Processes
from slotline.batch.rows import Outcome
from slotline.batch.runner import PRIORITY, RunnerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.errors import SlotlineError
    from shared.openai.exchange import Exchange
    from shared.registry import WorkerStats
    from shared.schemas import JobRequest
    from shared.settings import WorkerSettings

#: Nobody watches the tokens, so they are written in larger portions than for a reader, unless the variable says.
FLUSH_S = 0.5

LOOK_S = 0.05
ASK_S = 10.0


@dataclass(slots=True)
class Pending:
    """A line that is being run, as one job for each of its choices; `exchange` is None for a plain one."""

    line: Line
    exchange: Exchange | None
    jobs: dict[str, dict[str, Any] | None] = field(default_factory=dict)


class EmbeddedRunner:
    """See `Runner`. It has processes of its own, which end with it.

    Args:
        model_path: a model file, or `fake:…`.
        slots: lines that generate at the same time; `auto` for as many as memory and speed allow.
        say: is told what is waited for.

    Raises:
        RunnerLost: they cannot be started; the message is what the worker says.
    """

    def __init__(self, model_path: str, slots: int | str, say: Callable[[str], None] = lambda text: None) -> None:
        from shared.batches.feeding import Feed
        from shared.connection import connect
        from shared.jobs import JobStore
        from shared.registry import Registry
        from shared.settings import Settings, load

        self.trouble: str | None = None
        self._pending: dict[str, Pending] = {}
        self._refused: list[Outcome] = []
        self._left: list[str] = []
        say("starting Valkey and a worker")
        self._processes = Processes(worker_environment(model_path, slots))
        try:
            self._client: Any = connect(load(Settings, {"redis_url": self._processes.redis_url}))
            self._registry = Registry(self._client)
            say("loading the model")
            worker = self._wait_for_worker()
            self.model, self.slots = worker.model, worker.n_parallel
            self.where = f"a worker of its own, {self.slots} slots"
            store = JobStore(self._client, load(Settings))
            self._feed = Feed(store, uuid.uuid4().hex)
        except BaseException:
            self._processes.close()
            raise

    def start(self, line: Line) -> None:
        """See `Runner`."""
        from shared.errors import SlotlineError

        try:
            model = self._resolve(line.body.get("model"))
            exchange, requests = _requests(line)
        except SlotlineError as error:
            self._refused.append(refused(line, error))
            return
        pending = Pending(line, exchange)
        jobs = {f"{line.number}-{choice}": request for choice, request in enumerate(requests)}
        pending.jobs = dict.fromkeys(jobs)
        with self._lost_if_unreachable():
            for job_id, request in jobs.items():
                self._pending[job_id] = pending
                self._feed.submit(job_id, request, model)

    def ended(self, wait_s: float) -> list[Outcome]:
        """See `Runner`."""
        outcomes, self._refused = self._refused, []
        with self._lost_if_unreachable():
            self._processes.check()
            told = [i for i in dict.fromkeys(self._feed.ended(0 if outcomes else wait_s)) if i in self._pending]
            finals = self._feed.finals(told)
            self._left = self._feed.discard([*self._left, *finals])
        for job_id, final in finals.items():
            pending = self._pending.pop(job_id)
            pending.jobs[job_id] = final or _removed(job_id)
            if all(pending.jobs.values()):
                outcomes.append(_outcome(pending, self.model))
        return outcomes

    def count_tokens(self, text: str) -> int:
        """See `Runner`."""
        from shared.ask import ask
        from shared.errors import SlotlineError

        try:
            with self._lost_if_unreachable():
                answer = ask(self._client, self.model, "tokenize", _tokenize(text), ASK_S)
        except SlotlineError as error:
            raise RunnerLost(error.message) from None
        return len(answer["tokens"])

    def close(self) -> None:
        """See `Runner`."""
        self._client.close()
        self._processes.close()

    def _wait_for_worker(self) -> WorkerStats:
        while True:
            self._processes.check()
            with self._lost_if_unreachable(starting=True):
                if workers := self._registry.workers():
                    return workers[0]
            time.sleep(LOOK_S)

    def _resolve(self, name: str | None) -> str:
        if name is None or name == self.model:
            return self.model
        card = self._registry.resolve(name)
        return card.name if card else self.model

    @contextmanager
    def _lost_if_unreachable(self, *, starting: bool = False) -> Iterator[None]:
        from redis.exceptions import RedisError

        try:
            yield
        except RedisError as error:
            self._processes.check()
            if not starting:
                raise RunnerLost(f"Valkey does not answer: {error}") from None


def worker_settings(model_path: str, slots: int | str) -> WorkerSettings:
    """The settings of the worker; what the user has set for itself counts, save the model, and a number of slots.

    Raises:
        SettingsError: a line for each bad value.
    """
    from shared.settings import WorkerSettings, load

    # The window bounds what waits, so a limit of the queue would only be in the way.
    fixed = {"model_path": model_path, "n_parallel": None if slots == "auto" else slots, "max_queue": 0}
    ours = {"n_ctx": 0, "n_parallel": "auto", "cache_prompt": True, "flush_s": FLUSH_S}
    return load(WorkerSettings, fixed, otherwise=ours)


def worker_environment(model_path: str, slots: int | str) -> dict[str, str]:
    """The variables of the worker."""
    settings = worker_settings(model_path, slots)
    ours = ("model_path", "n_ctx", "n_parallel", "max_queue", "cache_prompt", "flush_s")
    return {f"SLOTLINE_{name.upper()}": str(getattr(settings, name)) for name in ours}


def _requests(line: Line) -> tuple[Exchange | None, list[JobRequest]]:
    """The jobs of a line.

    Raises:
        SlotlineError: it cannot be served.
    """
    from pydantic import ValidationError

    from shared.errors import InvalidRequest
    from shared.openai.exchange import read_exchange
    from shared.schemas import JobRequest
    from shared.validation import invalid

    body = {"priority": PRIORITY, **line.body}
    if line.endpoint != JOBS:
        exchange = read_exchange(line.endpoint, body)  # type: ignore[arg-type]
        return exchange, exchange.jobs()
    try:
        job = JobRequest.model_validate(body)
    except ValidationError as error:
        raise invalid(error, JobRequest.model_fields) from None
    if job.webhook_url is not None:
        raise InvalidRequest("`webhook_url` needs a server: nothing else sends webhooks", "webhook_url")
    return None, [job]


def refused(line: Line, error: SlotlineError) -> Outcome:
    """What becomes of a line that cannot be served."""
    from shared.http_status import STATUS

    return Outcome(line, None, error.to_dict(), STATUS[type(error)])


def check_line(line: Line) -> SlotlineError | None:
    """Why a line's request could not be served by any model; None if nothing speaks against it."""
    from shared.errors import SlotlineError

    try:
        _requests(line)
    except SlotlineError as error:
        return error
    return None


def _outcome(pending: Pending, model: str) -> Outcome:
    from shared.openai.exchange import Call, failure_of

    line, finals = pending.line, [final for final in pending.jobs.values() if final is not None]
    error = next((failure for final in finals if (failure := failure_of(final))), None)
    if error is not None:
        return refused(line, error)
    request_id = finals[0]["id"]
    if pending.exchange is None:
        return Outcome(line, finals[0], request_id=request_id)
    call = Call(f"batch{line.number}", int(finals[0].get("created_at") or 0), model)
    return Outcome(line, pending.exchange.answer(call, finals), request_id=request_id)


def _removed(job_id: str) -> dict[str, Any]:
    from shared.errors import JobRemoved

    return {"id": job_id, "status": "failed", "error": JobRemoved("the job is gone").to_dict()}


def _tokenize(text: str) -> dict[str, Any]:
    return {"content": text, "add_special": True, "parse_special": False}
