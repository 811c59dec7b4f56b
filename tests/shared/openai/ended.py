"""Ended jobs and events of jobs, as `/v1/jobs` shows them."""

from __future__ import annotations

import base64
import struct
from typing import Any

from shared.openai.exchange import Call
from shared.records import JobRecord, job_object
from shared.results import JobObject, TokenEvent

CALL = Call("abc", 1_700_000_000, "tiny")
RECORD = JobRecord.parse("j1", {b"origin": b"sl:tiny:interactive", b"status": b"finished"})


def completed(
    text: str | None = "", prompt_tokens: int = 7, tokens: int = 3, cached: int = 0, **more: Any
) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "cached_tokens": cached,
    }
    return _job(status="completed", text=text, usage=usage, **{"finish_reason": "stop", **more})


def failed(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return _job(status="failed", error={"message": message, "type": "t", "code": code, "param": param})


def cancelled() -> dict[str, Any]:
    return _job(status="cancelled", text="so f", finish_reason="cancelled")


def embedded(numbers: list[float], prompt_tokens: int = 4) -> dict[str, Any]:
    packed = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
    return completed(None, prompt_tokens, 0, embedding=packed)


def _job(**parts: Any) -> dict[str, Any]:
    found = job_object(RECORD, **parts)
    JobObject.model_validate(found)
    return found


def event(index: int, text: str, token: int | None = 5, **more: Any) -> dict[str, Any]:
    found = {"index": index, "text": text, "token": token, **more}
    TokenEvent.model_validate(found)
    return found


def logprob(token: str, value: float = -0.5, raw: bytes | None = None, top: Any = ()) -> dict[str, Any]:
    """One `TokenLogprob`; `top` are pairs of token and log probability."""
    likely = [{"token": t, "logprob": v, "bytes": list(t.encode())} for t, v in top]
    return {"token": token, "logprob": value, "bytes": list(raw or token.encode()), "top_logprobs": likely}
