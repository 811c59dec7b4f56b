"""The client of the HTTP API."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, cast, overload

from slotline.batches import Batches, Files
from slotline.errors import SlotlineClientError
from slotline.home import default_url
from slotline.job import Job
from slotline.mapping import map_jobs
from slotline.results import Result
from slotline.streams import TokenStream
from slotline.transport import Transport

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]
Item = Prompt | Messages | Mapping[str, Any]


class Client:
    """Talks to one Slotline server. May be shared by threads; close it, or use it in a `with` block.

    Wherever a prompt is taken it may be text, token ids, or, as `messages`, a conversation. `options` are the
    other fields of `POST /v1/jobs`, such as `max_tokens`, `temperature`, `stop` or `priority`; the server
    refuses those it does not know.

    Args:
        base_url: the server; left out, `SLOTLINE_URL`, else a running `slotline up`, else port 8000 here.
        timeout: seconds for one exchange with the server, waits that it asks for (429, 503) included.
    """

    def __init__(self, base_url: str | None = None, timeout: float = 30.0) -> None:
        self._transport = Transport(base_url or default_url(), timeout)

    @property
    def base_url(self) -> str:
        """The server this client talks to."""
        return self._transport.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Jobs do not notice."""
        self._transport.close()

    def generate(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, timeout: float = 60, **options: Any
    ) -> Result:
        """Submit a job and wait for its result, `timeout` seconds in all.

        Raises:
            ResultTimeout: it has not ended in time; it lives on, under the error's `job_id`.
            JobFailed, JobCancelled: it ended that way.
            ApiError: the server refused it.
        """
        clock = self._transport.clock
        deadline = clock() + timeout
        job = self._submit(prompt, messages, options, timeout)
        return job.result(timeout=max(0.0, deadline - clock()))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = 30,
        **options: Any,
    ) -> TokenStream:
        """Submit a job and iterate over its tokens as they come.

        `timeout` is the time to wait for each token, counted from the start of the job: queueing does not count.
        The job is submitted at once, before the first token is asked for.

        Raises:
            ApiError: the server refused it. For what the iteration raises, see `TokenStream`.
        """
        return self._submit(prompt, messages, {"stream": True, **options}).stream(timeout)

    def submit(self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Any) -> Job:
        """Submit a job and return its handle at once.

        A reply that is lost does no harm: the request is sent again with the same `Idempotency-Key`.

        Raises:
            ApiError: the server refused it.
            ConnectionFailed: the server was not reached.
        """
        return self._submit(prompt, messages, options)

    @overload
    def map(
        self, items: Iterable[Item], *, window: int = 32, return_errors: Literal[False] = False, **options: Any
    ) -> Generator[Result, None, None]: ...

    @overload
    def map(
        self, items: Iterable[Item], *, window: int = 32, return_errors: bool, **options: Any
    ) -> Generator[Result | SlotlineClientError, None, None]: ...

    def map(
        self, items: Iterable[Item], *, window: int = 32, return_errors: bool = False, **options: Any
    ) -> Generator[Any, None, None]:
        """Run a job for each item and yield the results in the order of the items.

        Items are taken only as there is room, so the iterable may be endless. Closing the generator, an exception
        in the loop over it, or Ctrl-C, cancels what is under way.

        Args:
            items: prompts (text or token ids), conversations, or mappings with fields of `POST /v1/jobs`, which
                count before `options`.
            window: most items that were taken and whose results were not.
            return_errors: yield the error of an item in the place of its result. Left out, the first one is raised
                in its turn, and the rest is cancelled.
            options: fields of every job. The priority is `batch` unless they say otherwise.

        Raises:
            JobFailed, JobCancelled, ApiError, ConnectionFailed: of the item whose turn it is.
        """
        if window < 1:
            raise ValueError("window must be at least 1")
        return map_jobs(self.base_url, items, lambda item: _item_body(item, options), window, return_errors)

    @property
    def files(self) -> Files:
        """The server's files."""
        return Files(self._transport)

    @property
    def batches(self) -> Batches:
        """The server's batches."""
        return Batches(self._transport)

    def job(self, job_id: str) -> Job:
        """The handle of a job submitted before, here or elsewhere. The server is not asked."""
        return Job(self._transport, job_id)

    def jobs(self, **filters: Any) -> dict[str, Any]:
        """One page of jobs, newest first, without their texts.

        Args:
            filters: `status`, `limit`, `after` and the others of `GET /v1/jobs`.
        """
        params = {name: value for name, value in filters.items() if value is not None}
        page: dict[str, Any] = self._transport.call("GET", "/v1/jobs", params=params)
        return page

    def tokenize(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text. `model` picks one of several."""
        ids: list[int] = self._transport.call("POST", "/v1/tokenize", {"content": text, **options})["tokens"]
        return ids

    def detokenize(self, tokens: Sequence[int], **options: Any) -> str:
        """The text of token ids. `model` picks one of several."""
        body = {"tokens": [int(token) for token in tokens], **options}
        return str(self._transport.call("POST", "/v1/detokenize", body)["content"])

    def models(self) -> list[dict[str, Any]]:
        """The models that jobs may name."""
        models: list[dict[str, Any]] = self._transport.call("GET", "/v1/models")["data"]
        return models

    def stats(self) -> dict[str, Any]:
        """Figures of the live workers, as `GET /v1/stats` gives them."""
        stats: dict[str, Any] = self._transport.call("GET", "/v1/stats")
        return stats

    def _submit(
        self,
        prompt: Prompt | None,
        messages: Messages | None,
        options: Mapping[str, Any],
        timeout_s: float | None = None,
    ) -> Job:
        body = _body(prompt, messages, options)
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        accepted = self._transport.call("POST", "/v1/jobs", body, headers=headers, timeout_s=timeout_s)
        return Job(self._transport, accepted["id"])


def _body(prompt: Prompt | None, messages: Messages | None, options: Mapping[str, Any]) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise TypeError("give either a prompt or messages")
    body = {name: _plain(value) for name, value in options.items() if value is not None}
    if messages is not None:
        body["messages"] = [dict(message) for message in messages]
    elif prompt is not None:
        # Token ids may come as another kind of integer, or of sequence, than JSON knows.
        body["prompt"] = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
    return body


def _item_body(item: Item, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the job of one item of `map`."""
    options = {"priority": "batch", **options}
    if isinstance(item, Mapping):
        fields = {**options, **item}
        return _body(fields.pop("prompt", None), fields.pop("messages", None), fields)
    if not isinstance(item, Iterable):
        raise TypeError(f"an item of `map` is a prompt, messages or the fields of a job, not {type(item).__name__}")
    if not isinstance(item, str) and any(isinstance(part, Mapping) for part in item):
        return _body(None, cast(Messages, item), options)
    return _body(cast(Prompt, item), None, options)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        # JSON keys are text, also the token ids of `logit_bias`.
        return {str(key): _plain(item) for key, item in value.items()}
    return value
