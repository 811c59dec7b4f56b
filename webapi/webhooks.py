"""Webhooks as callers see them: what a `webhook_url` needs, and what the OpenAPI document says of what is sent."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from shared.batches.schemas import BatchObject
from shared.errors import InvalidRequest
from shared.results import JobObject
from shared.schemas import Strict
from shared.settings import WebSettings
from shared.webhooks.address import NotPublic, check_host
from webapi.describe import REF, add_schema, blueprint

#: It has no endpoints, only the descriptions of what is sent.
bp = blueprint("webhooks", "webhooks")


class JobWebhook(Strict):
    """The body of a webhook about a job."""

    id: str = Field(description="The `webhook-id`, the same in every attempt.")
    object: Literal["event"]
    type: Literal["job.completed", "job.failed", "job.cancelled"]
    created_at: int = Field(description="When the job ended, in seconds since 1970.")
    timestamp: str = Field(description="The same as ISO 8601.")
    data: JobObject


class BatchWebhook(Strict):
    """The body of a webhook about a batch."""

    id: str = Field(description="The `webhook-id`, the same in every attempt.")
    object: Literal["event"]
    type: Literal["batch.completed", "batch.failed", "batch.cancelled", "batch.expired"]
    created_at: int = Field(description="When the batch ended, in seconds since 1970.")
    timestamp: str = Field(description="The same as ISO 8601.")
    data: BatchObject


BODIES: dict[str, type[BaseModel]] = {"job": JobWebhook, "batch": BatchWebhook}
HEADERS = {
    "webhook-id": "The same in every attempt, so that one that comes twice is known.",
    "webhook-timestamp": "Of this attempt, in seconds since 1970.",
    "webhook-signature": "`v1,` and the base64 of the HMAC-SHA256; one for each secret, separated by spaces.",
}

for _body in BODIES.values():
    add_schema(bp, _body)


def check_webhook(settings: WebSettings, url: str | None) -> None:
    """Refuse a `webhook_url` that nothing could be sent to.

    Raises:
        InvalidRequest: there is no secret to sign with, or the host is written as one that is not public.
    """
    if url is None:
        return
    if not settings.webhook_secret:
        raise InvalidRequest("`webhook_url`: this server sends no webhooks (SLOTLINE_WEBHOOK_SECRET)", "webhook_url")
    if settings.webhook_allow_private:
        return
    try:
        check_host(urlsplit(url).hostname or "")
    except NotPublic as error:
        raise InvalidRequest(f"`webhook_url`: {error} (SLOTLINE_WEBHOOK_ALLOW_PRIVATE)", "webhook_url") from None


def described() -> dict[str, Any]:
    """The part `webhooks` of the OpenAPI document."""
    return {f"{kind}.ended": {"post": _operation(kind, body)} for kind, body in BODIES.items()}


def _operation(kind: str, body: type[BaseModel]) -> dict[str, Any]:
    return {
        "summary": f"A {kind} has ended",
        "description": "Sent to the `webhook_url` that it was made with, until the answer is a status of 2xx.",
        "tags": ["webhooks"],
        "parameters": [
            {"name": name, "in": "header", "required": True, "description": text, "schema": {"type": "string"}}
            for name, text in HEADERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": REF.format(model=body.__name__)}}},
        },
        "responses": {
            "2XX": {"description": "It has arrived."},
            "410": {"description": "Not wanted any more: it is not tried again."},
        },
    }
