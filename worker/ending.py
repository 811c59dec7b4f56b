"""How a request ends: what was held back of its answer, then the end."""

from __future__ import annotations

import logging

from shared.errors import InternalError, SlotlineError
from shared.schemas import FinishReason
from worker.answer import Delta
from worker.backend import Logits
from worker.requests import Ended, Logprob, Request, Stats, Token
from worker.text import Transcript

log = logging.getLogger("slotline.engine")


def ending(
    request: Request,
    transcript: Transcript,
    stats: Stats,
    reason: FinishReason | None,
    error: SlotlineError | None = None,
    logprobs: tuple[Logprob, ...] = (),
    embedding: Logits | None = None,
) -> tuple[Token | None, Ended]:
    """The token event of what was held back, if anything was, and the end. It finishes the transcript.

    An answer that stopped of itself and called tools ends with `tool_calls`. A defect in the transcript turns the end
    into a failure.
    """
    tail = None
    try:
        # A retry goes on from the logged tokens, so what is held back must not be given out before it.
        if error is None or not error.retryable:
            tail = _held_back(request, transcript, stats.generated_tokens)
    except Exception as defect:
        error, reason = as_ours(defect), None
    ended = Ended(
        request,
        tokens=stats.generated_tokens + (tail is not None),
        text=transcript.text,
        stats=stats,
        finish_reason="tool_calls" if reason == "stop" and transcript.tool_calls else reason,
        error=error,
        reasoning=transcript.reasoning,
        tool_calls=transcript.tool_calls,
        logprobs=None if request.logprobs is None else logprobs,
        embedding=embedding,
    )
    return tail, ended


def _held_back(request: Request, transcript: Transcript, index: int) -> Token | None:
    text, delta = transcript.finish()
    if text or (delta is not None and delta != Delta()):
        return Token(request, index, None, text, delta)
    return None


def as_ours(error: Exception) -> SlotlineError:
    """An error of our tree; any other is a defect, which must not harm other requests."""
    if isinstance(error, SlotlineError):
        return error
    log.error("a defect in what one request alone needs", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")
