"""The rows of a batch's results, in the shape of OpenAI's batch output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from shared.batches.lines import Line
from shared.batches.records import Usage
from shared.errors import SlotlineError
from shared.http_status import STATUS
from shared.stream import dumps

#: Why a line was not run. *Source:* OpenAI's Batch guide, "Cancelling a batch" and "Batch expiration".
NOT_RUN = {
    "batch_cancelled": "This request was not run because the batch was cancelled.",
    "batch_expired": "This request could not be run before the completion window expired.",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one line. `data` is JSON with its line end; `job_ids` are what is left of its jobs."""

    number: int
    which: Literal["output", "error"]
    data: bytes
    usage: Usage = Usage()
    job_ids: tuple[str, ...] = ()


def request_id(batch_id: str, number: int) -> str:
    """What names a line in its row, and the parent of its jobs."""
    return f"{batch_id}-{number}"


def answer_id(batch_id: str, line: Line) -> str:
    """What stands behind `chatcmpl-` and the like; always the same for a line."""
    return blake2b(request_id(batch_id, line.number).encode(), digest_size=12).hexdigest()


def answered(batch_id: str, line: Line, body: dict[str, Any], job_ids: Iterable[str]) -> Row:
    """The row of a line that was served."""
    data = _row(batch_id, line, _response(batch_id, line, 200, body), None)
    return Row(line.number, "output", data, _usage(body.get("usage") or {}), tuple(job_ids))


def refused(batch_id: str, line: Line, error: SlotlineError, job_ids: Iterable[str] = ()) -> Row:
    """The row of a line that was not served: the status and the body that the endpoint would have answered with."""
    response = _response(batch_id, line, STATUS[type(error)], {"error": error.to_dict()})
    return Row(line.number, "error", _row(batch_id, line, response, None), job_ids=tuple(job_ids))


def not_run(batch_id: str, line: Line, code: str, job_ids: Iterable[str] = ()) -> Row:
    """The row of a line that the end of its batch has cut off; `code` is one of `NOT_RUN`."""
    data = _row(batch_id, line, None, {"code": code, "message": NOT_RUN[code]})
    return Row(line.number, "error", data, job_ids=tuple(job_ids))


def _response(batch_id: str, line: Line, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id(batch_id, line.number), "body": body}


def _row(batch_id: str, line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    row = {
        "id": f"batch_req_{answer_id(batch_id, line)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return dumps(row).encode() + b"\n"


def _usage(usage: dict[str, Any]) -> Usage:
    prompt, answer = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Usage(
        input=usage.get("prompt_tokens", 0),
        output=usage.get("completion_tokens", 0),
        cached=prompt.get("cached_tokens") or 0,
        reasoning=answer.get("reasoning_tokens") or 0,
    )
