"""What the client gives back: tokens while they come, the result at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slotline.errors import JobCancelled, JobFailed, ProtocolError


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `str(token)` is its text.

    Attributes:
        text: may be empty while half a character or a possible stop string is held back.
        index: 0, 1, 2 … without holes, but where one stands for several that the server has lost.
        token: its id; None for text that was held back to the very end, and where it stands for several.
    """

    text: str
    index: int
    token: int | None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Result:
    """A completed job. `str(result)` is its text; `job` is the whole object as the API gave it."""

    job_id: str
    text: str
    finish_reason: str | None
    usage: dict[str, Any] | None
    timings: dict[str, Any] | None
    seed: int | None
    model: str
    job: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return self.text


def outcome(job: dict[str, Any]) -> Result:
    """The result of an ended job.

    Raises:
        JobFailed, JobCancelled: it ended that way.
    """
    if job.get("status") == "failed":
        error = job.get("error") or {}
        raise JobFailed(f"job {job['id']} failed: {error.get('message') or 'no reason given'}", job)
    if job.get("status") == "cancelled":
        raise JobCancelled(f"job {job['id']} was cancelled", job)
    if job.get("status") != "completed":
        raise ProtocolError(f"job {job.get('id')!r} was said to have ended, but is {job.get('status')!r}")
    return Result(
        job_id=job["id"],
        text=job.get("text") or "",
        finish_reason=job.get("finish_reason"),
        usage=job.get("usage"),
        timings=job.get("timings"),
        seed=job.get("seed"),
        model=job.get("model", ""),
        job=job,
    )
