"""What a job or batch shows of its webhook."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from shared.schemas import Strict

#: Fields of a job's or batch's hash, the same in both: where to, the ids of the webhooks of its ends (the last one
#: is what is shown), and as JSON what became of that one so far.
URL_FIELD, IDS_FIELD, LOG_FIELD = "sl_webhook", "sl_webhook_ids", "sl_webhook_log"


class WebhookAttempt(Strict):
    """One attempt to send a webhook: the receiver's HTTP status, or why there is none."""

    at: float = Field(description="Seconds since 1970.")
    status: int | None
    error: str | None


class WebhookState(Strict):
    """A webhook, from the request for it to its delivery. Times are seconds since 1970."""

    url: str
    id: str | None = Field(description="Its `webhook-id`; null before the end that it tells of.")
    status: Literal["pending", "delivered", "failed"] = Field(description="`failed`: it is not tried again.")
    attempts: list[WebhookAttempt]
    next_attempt_at: float | None


def webhook_of(raw: Mapping[bytes, bytes]) -> dict[str, Any] | None:
    """The webhook of a job or batch (`WebhookState`), from its hash as Redis holds it; None where none is wanted."""
    url = raw.get(URL_FIELD.encode())
    if url is None:
        return None
    log = raw.get(LOG_FIELD.encode())
    ids = raw.get(IDS_FIELD.encode(), b"").decode().split()
    so_far: dict[str, Any] = {
        "id": ids[-1] if ids else None,
        "status": "pending",
        "attempts": [],
        "next_attempt_at": None,
    }
    return {"url": url.decode()} | so_far | (json.loads(log) if log else {})
