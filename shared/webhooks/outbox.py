"""The outbox: webhooks that have not been delivered, written by the scripts that end jobs and batches.

A sender claims a webhook for a while and settles it afterwards. A claim that is not settled runs out, and the webhook
is sent again with the same id: nothing is lost with a sender, and a receiver may get it twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

import redis

from shared.batches.records import BatchRecord
from shared.lua import script
from shared.names import WEBHOOKS, batch_key, webhook_key
from shared.stream import dumps

SettledAs = Literal["delivered", "failed", "pending", "gone"]


@dataclass(frozen=True, slots=True)
class Webhook:
    """A claimed webhook.

    Attributes:
        at: when the job or batch ended, in seconds since 1970.
        attempt: the number of the attempt that the claim is for, from 1.
        data: of a job its object, of a batch its hash (names and values in turn), both as JSON.
    """

    id: str
    url: str
    type: str
    at: int
    attempt: int
    subject: str
    data: str

    @classmethod
    def parse(cls, webhook_id: str, raw: Mapping[bytes, bytes]) -> Webhook:
        """From the hash that Redis holds."""
        text = {name.decode(): value.decode() for name, value in raw.items()}
        return cls(
            id=webhook_id,
            url=text["url"],
            type=text["type"],
            at=int(text["at"]),
            attempt=int(text["tries"]),
            subject=text["subject"],
            data=text["data"],
        )

    def body(self) -> bytes:
        """What is sent, the same bytes in every attempt: an event in the shape of OpenAI's, `data` the whole object."""
        event = {
            "id": self.id,
            "object": "event",
            "type": self.type,
            "created_at": self.at,
            "timestamp": datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "data": self._object(),
        }
        return dumps(event).encode()

    def _object(self) -> Any:
        found = json.loads(self.data)
        if not self.type.startswith("batch."):
            return found
        raw = {name.encode(): value.encode() for name, value in zip(found[::2], found[1::2], strict=True)}
        return BatchRecord.parse(self.subject.removeprefix(batch_key("")), raw).shown()


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of sending a webhook. `at` is in seconds since 1970; without `status`, `error` says why."""

    at: float
    status: int | None
    error: str | None

    @property
    def state(self) -> Literal["delivered", "failed", "pending"]:
        """What that means for the webhook. A receiver that says 410 wants no more of it."""
        if self.status is not None and 200 <= self.status < 300:
            return "delivered"
        return "failed" if self.status == 410 else "pending"

    def entry(self) -> str:
        """What is noted of it (`WebhookAttempt`)."""
        return dumps({"at": round(self.at, 3), "status": self.status, "error": self.error})


class Outbox:
    """All operations on the outbox. Safe to share between threads. Times are those of Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._claim = script(client, "webhook_claim")
        self._settle = script(client, "webhook_settle")

    def claim(self, count: int, lease_s: float) -> list[Webhook]:
        """Take up to `count` webhooks that are due, for `lease_s` seconds."""
        claimed = self._claim(keys=[WEBHOOKS], args=[count, int(lease_s * 1000)])
        return [
            Webhook.parse(webhook_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True)))
            for webhook_id, flat in claimed
        ]

    def settle(self, webhook: Webhook, attempt: Attempt, wait_s: float, limit_s: float) -> SettledAs:
        """Note an attempt with the job or batch, as far as that is still there.

        Args:
            webhook: as claimed.
            attempt: what came of it.
            wait_s: time before the next attempt, where one is needed.
            limit_s: for how long after the first one attempts are made; a next one beyond that is given up.
        """
        outcome = self._settle(
            keys=[WEBHOOKS, webhook_key(webhook.id)],
            args=[
                webhook.id,
                webhook.attempt,
                attempt.entry(),
                attempt.state,
                int(wait_s * 1000),
                int(limit_s * 1000),
            ],
        )
        return cast(SettledAs, outcome.decode())
