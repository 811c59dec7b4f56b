"""Runs lines on a server, over HTTP."""

from __future__ import annotations

import uuid
from typing import Any

from slotline.batch.lines import JOBS, Line
from slotline.batch.rows import Outcome
from slotline.batch.runner import PRIORITY, RunnerLost
from slotline.calls import Answer, Calls
from slotline.client import Client
from slotline.errors import ApiError, ConnectionFailed, SlotlineClientError

#: How long to go on without a server that is well.
PATIENCE_S = 120.0

#: The server keeps an ended job only until its answer has surely been read, so that many lines do not fill it.
RESULT_TTL_S = 300

#: Slots to reckon with where no worker is live yet.
SOME_SLOTS = 4


class HttpRunner:
    """See `Runner`. A plain line is a job, an OpenAI line a call of its endpoint.

    Args:
        url: the server; left out, the one a `Client` finds.
        model: the model that lines go to which name none.

    Raises:
        RunnerLost: there is no server, or no such model.
    """

    def __init__(self, url: str | None, model: str | None, patience_s: float = PATIENCE_S) -> None:
        self._client = Client(url)
        try:
            self.model = served_model(self._client, model)
            self.slots = _slots(self._client, self.model)
        except BaseException:
            self._client.close()
            raise
        self.where = self._client.base_url
        self._calls = Calls(self._client.base_url, patience_s)
        # Jobs of one start are told apart from those of another, so that a failed line can run again.
        self._start_id = uuid.uuid4().hex[:12]

    @property
    def trouble(self) -> str | None:
        """See `Runner`."""
        return self._calls.trouble

    def start(self, line: Line) -> None:
        """See `Runner`."""
        body = {"model": self.model, **line.body}
        if line.endpoint == JOBS:
            job_id = f"batch-{self._start_id}-{line.number}"
            job = {"priority": PRIORITY, "result_ttl_s": RESULT_TTL_S, **body, "id": job_id}
            self._calls.run_job(line, job)
        else:
            self._calls.post(line, line.endpoint, {"priority": PRIORITY, **body})

    def ended(self, wait_s: float) -> list[Outcome]:
        """See `Runner`."""
        return [_outcome(answer) for answer in self._calls.ended(wait_s)]

    def count_tokens(self, text: str) -> int:
        """See `Runner`."""
        try:
            return len(self._client.tokenize(text, model=self.model))
        except SlotlineClientError as error:
            raise RunnerLost(str(error)) from None

    def close(self) -> None:
        """See `Runner`."""
        self._calls.close()
        self._client.close()


def served_model(client: Client, name: str | None) -> str:
    """The full name of a model, or of the one that the server takes where none is named.

    Raises:
        RunnerLost: there is no server, or no such model.
    """
    try:
        models = client.models()
    except SlotlineClientError as error:
        raise RunnerLost(str(error)) from None
    if not models:
        raise RunnerLost(f"{client.base_url} knows no model yet: start a worker there")
    if name is None:
        return str(next((m for m in models if m.get("live_workers")), models[0])["id"])
    found = next((m for m in models if name in (m["id"], m.get("alias") or None)), None)
    if found is None:
        known = ", ".join(m["id"] for m in models)
        raise RunnerLost(f"there is no model {name!r} at {client.base_url}; its models are: {known}")
    return str(found["id"])


def _slots(client: Client, model: str) -> int:
    try:
        workers = client.stats().get("workers") or []
    except SlotlineClientError as error:
        raise RunnerLost(str(error)) from None
    return sum(w.get("n_parallel", 0) for w in workers if w.get("model") == model) or SOME_SLOTS


def _outcome(answer: Answer) -> Outcome:
    line, error = answer.key, answer.error
    if isinstance(error, ConnectionFailed) or (isinstance(error, ApiError) and error.status in (502, 503)):
        raise RunnerLost(f"{error}: the server has not been well for too long")
    if error is not None:
        return Outcome(line, None, _shown(error), error.status if isinstance(error, ApiError) else 500)
    body: dict[str, Any] = answer.body or {}
    if line.endpoint != JOBS:
        return Outcome(line, body, request_id=str(body.get("id", "")))
    if body["status"] == "completed":
        return Outcome(line, body, request_id=answer.job_id)
    reason = body.get("error") or {"message": f"the job was {body['status']}", "code": body["status"]}
    return Outcome(line, body, reason, 500, answer.job_id)


def _shown(error: SlotlineClientError) -> dict[str, Any]:
    if isinstance(error, ApiError):
        return {"message": error.message, "type": error.kind, "code": error.code, "param": error.param}
    return {"message": error.message, "type": "client_error", "code": "client_error", "param": None}
