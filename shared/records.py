"""A job as stored (`JobRecord`) and as shown (`job_object`)."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shared.names import Priority, queue_name, split_queue_name
from shared.schemas import JobStatus
from shared.webhooks.state import webhook_of

#: RQ's status to ours. `created` is a job that was saved but not enqueued.
STATUS: dict[str, JobStatus] = {
    "created": "queued",
    "queued": "queued",
    "scheduled": "queued",
    "deferred": "queued",
    "ready_to_enqueue": "queued",
    "rate_limited": "queued",
    "started": "running",
    "finished": "completed",
    "failed": "failed",
    "stopped": "cancelled",
    "canceled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class SlotTime:
    """Seconds that a job has been in slots, of whatever workers, and how many of them until its first token."""

    used_s: float
    prompt_s: float | None = None

    @property
    def fields(self) -> dict[str, int]:
        """As fields of the job's hash."""
        prompt = {} if self.prompt_s is None else {"sl_prompt_ms": round(self.prompt_s * 1000)}
        return {"sl_used_ms": round(self.used_s * 1000), **prompt}


NO_TIME = SlotTime(0.0)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The parts of an RQ job's hash that we read. Times are seconds since 1970."""

    id: str
    origin: str
    model: str
    priority: str
    rq_status: str
    created_at: float | None
    enqueued_at: float | None
    started_at: float | None
    ended_at: float | None
    result_ttl_s: int | None
    failure_ttl_s: int | None
    retries_left: int
    attempts: int
    #: As last noted.
    slot_time: SlotTime
    #: How many times in a row its process died while it was at work, without a token gained in between.
    crashes: int
    worker: str
    execution: str | None
    cancelling: bool
    end: JobStatus | None
    fingerprint: str | None
    parent: str | None = None
    #: The web process whose caller waits for it; None for a job that lives on by itself.
    bound: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    #: What is shown of its webhook (`WebhookState`).
    webhook: dict[str, Any] | None = None
    raw_data: bytes = b""

    @classmethod
    def parse(cls, job_id: str, raw: Mapping[bytes, bytes]) -> JobRecord:
        """Read a job hash as `HGETALL` gives it."""

        def text(name: bytes) -> str | None:
            value = raw.get(name)
            return None if value is None else value.decode("utf-8", "replace")

        origin = text(b"origin") or ""
        model, priority = split_queue_name(origin)
        return cls(
            id=job_id,
            origin=origin,
            model=model,
            priority=priority,
            rq_status=text(b"status") or "",
            created_at=_seconds(text(b"created_at")),
            enqueued_at=_seconds(text(b"enqueued_at")),
            started_at=_seconds(text(b"started_at")),
            ended_at=_seconds(text(b"ended_at")),
            result_ttl_s=_integer(raw.get(b"result_ttl")),
            failure_ttl_s=_integer(raw.get(b"failure_ttl")),
            retries_left=_integer(raw.get(b"retries_left")) or 0,
            attempts=_integer(raw.get(b"sl_attempts")) or 0,
            slot_time=_slot_time(raw),
            crashes=_integer(raw.get(b"sl_crashes")) or 0,
            worker=text(b"worker_name") or "",
            execution=text(b"sl_exec"),
            cancelling=b"sl_cancel" in raw,
            end=text(b"sl_end"),  # type: ignore[arg-type]
            fingerprint=text(b"sl_print"),
            parent=text(b"sl_parent"),
            bound=text(b"sl_bound"),
            metadata=_metadata(raw.get(b"meta")),
            webhook=webhook_of(raw),
            raw_data=raw.get(b"data", b""),
        )

    @classmethod
    def queued(
        cls,
        job_id: str,
        model: str,
        priority: Priority,
        metadata: dict[str, Any] | None = None,
        parent: str | None = None,
        bound: str | None = None,
    ) -> JobRecord:
        """A job that is just being queued, as far as its sender knows it."""
        moment = time.time()
        return cls(
            id=job_id,
            origin=queue_name(model, priority),
            model=model,
            priority=priority,
            rq_status="queued",
            created_at=moment,
            enqueued_at=moment,
            started_at=None,
            ended_at=None,
            result_ttl_s=None,
            failure_ttl_s=None,
            retries_left=0,
            attempts=0,
            slot_time=NO_TIME,
            crashes=0,
            worker="",
            execution=None,
            cancelling=False,
            end=None,
            fingerprint=None,
            parent=parent,
            bound=bound,
            metadata=metadata or {},
        )

    @property
    def status(self) -> JobStatus:
        """What the API calls it. A set cancel flag already shows as cancelled."""
        if self.rq_status == "started":
            return self.end or ("cancelled" if self.cancelling else "running")
        if self._is_handed_back_cancelled:
            return "cancelled"
        return STATUS.get(self.rq_status, "queued")

    @property
    def detail(self) -> str:
        """RQ's own state, or `cancelling` while the worker has yet to let go."""
        running = self.rq_status == "started" and self.cancelling and not self.end
        return "cancelling" if running or self._is_handed_back_cancelled else self.rq_status

    @property
    def _is_handed_back_cancelled(self) -> bool:
        """Whether its worker gave it back, or is to try it again, between the cancel and letting go."""
        return STATUS.get(self.rq_status) == "queued" and self.cancelling and not self.end

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it, save a retry."""
        return self.rq_status in ("finished", "failed", "stopped", "canceled") or (
            self.rq_status == "started" and self.end is not None
        )

    def arguments(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Function name, positional and keyword arguments of the call on the queue.

        Raises:
            ValueError: the payload is not what RQ's JSON serializer writes.
        """
        try:
            data = zlib.decompress(self.raw_data)
        except zlib.error:
            data = self.raw_data
        function, _instance, args, kwargs = json.loads(data)
        return str(function), list(args), dict(kwargs)


def job_object(
    record: JobRecord,
    *,
    status: JobStatus | None = None,
    detail: str | None = None,
    ended_at: float | None = None,
    ttl_s: int | None = None,
    position: int | None = None,
    text: str | None = None,
    reasoning_content: str | None = None,
    tool_calls: list[dict[str, Any]] | None = None,
    logprobs: list[dict[str, Any]] | None = None,
    embedding: str | None = None,
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = None,
    timings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The job object of the API (`JobObject`), also the data of `done` and `failed`."""
    shown = status or record.status
    ended = ended_at or record.ended_at
    over = shown in ("completed", "failed", "cancelled")
    if detail is None and status and over:
        detail = {"completed": "finished", "failed": "failed", "cancelled": "canceled"}[shown]
    return {
        "id": record.id,
        "object": "job",
        "model": record.model,
        "status": shown,
        "detail": detail or record.detail,
        "priority": record.priority,
        "position": position,
        "created_at": record.created_at,
        "enqueued_at": record.enqueued_at,
        "started_at": record.started_at,
        "ended_at": ended if over else None,
        "expires_at": ended + ttl_s if over and ended and ttl_s is not None else None,
        "text": text,
        "reasoning_content": reasoning_content,
        "tool_calls": tool_calls,
        "logprobs": logprobs,
        "embedding": embedding,
        "finish_reason": finish_reason,
        "usage": usage,
        "timings": timings,
        "seed": seed,
        "error": error,
        "attempts": record.attempts,
        "retries_left": record.retries_left,
        "parent": record.parent,
        "metadata": record.metadata,
        "webhook": record.webhook,
        "links": {
            "self": f"/v1/jobs/{record.id}",
            "events": f"/v1/jobs/{record.id}/events",
            "cancel": f"/v1/jobs/{record.id}/cancel",
        },
    }


def _seconds(value: str | None) -> float | None:
    """A moment as RQ writes it. `rq.utils.utcparse`, which knows the same forms, takes 20 times as long."""
    try:
        moment = datetime.fromisoformat(value) if value else None
    except ValueError:
        return None
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _slot_time(raw: Mapping[bytes, bytes]) -> SlotTime:
    used_ms, prompt_ms = _integer(raw.get(b"sl_used_ms")), _integer(raw.get(b"sl_prompt_ms"))
    return SlotTime((used_ms or 0) / 1000, None if prompt_ms is None else prompt_ms / 1000)


def _integer(value: bytes | None) -> int | None:
    try:
        return int(value) if value else None
    except ValueError:
        return None


def _metadata(value: bytes | None) -> dict[str, Any]:
    if not value:
        return {}
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
