"""A batch as stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from shared.batches.schemas import ENDED, BatchStatus
from shared.openai.exchange import Endpoint
from shared.webhooks.state import webhook_of

#: Fields that hold a second since 1970, named after the state that began then.
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of some lines."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The stored state of a batch at one moment. Times are seconds since 1970."""

    id: str
    status: BatchStatus
    input_file_id: str
    endpoint: Endpoint
    completion_window: str
    created_at: int
    expires_at: int
    paused: bool
    #: The resolved name of the model; None until the lines were checked.
    model: str | None
    total: int
    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None
    #: Each with `code`, `line`, `message` and `param`.
    errors: list[dict[str, Any]] | None
    usage: Usage
    metadata: dict[str, str] | None
    times: dict[str, int]
    #: How often the failed lines were run again.
    retries: int
    #: What is shown of its webhook (`WebhookState`).
    webhook: dict[str, Any] | None

    @classmethod
    def parse(cls, batch_id: str, raw: Mapping[bytes, bytes]) -> BatchRecord:
        """From the hash that Redis holds."""
        text = {name.decode(): value.decode() for name, value in raw.items()}
        number = {name: int(text.get(name) or 0) for name in ("total", "completed", "failed", "retries")}
        return cls(
            id=batch_id,
            status=cast(BatchStatus, text["status"]),
            input_file_id=text["input_file_id"],
            endpoint=cast(Endpoint, text["endpoint"]),
            completion_window=text["completion_window"],
            created_at=int(text["created_at"]),
            expires_at=int(text["expires_at"]),
            paused="paused" in text,
            model=text.get("model"),
            output_file_id=text.get("output_file_id"),
            error_file_id=text.get("error_file_id"),
            errors=json.loads(text["errors"]) if "errors" in text else None,
            usage=Usage(**{name: int(text.get(f"usage_{name}", 0)) for name in Usage.__slots__}),
            metadata=json.loads(text["metadata"]) if "metadata" in text else None,
            times={name: int(text[name]) for name in TIMES if name in text},
            webhook=webhook_of(raw),
            **number,
        )

    @property
    def is_ended(self) -> bool:
        """Whether nothing more happens to it by itself."""
        return self.status in ENDED

    @property
    def remaining(self) -> int:
        """Lines without a row in the results."""
        return self.total - self.completed - self.failed

    def shown(self) -> dict[str, Any]:
        """The batch object of the API (`BatchObject`)."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if self.errors is None else {"object": "list", "data": self.errors},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "paused": self.paused,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self._usage() if "in_progress_at" in self.times else None,
            "metadata": self.metadata,
            "webhook": self.webhook,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.usage.input,
            "input_tokens_details": {"cached_tokens": self.usage.cached},
            "output_tokens": self.usage.output,
            "output_tokens_details": {"reasoning_tokens": self.usage.reasoning},
            "total_tokens": self.usage.input + self.usage.output,
        }


class Lines:
    """A set of line numbers, from 1, as a bitmap of Redis."""

    def __init__(self, bitmap: bytes = b"") -> None:
        self._bitmap = bitmap

    def __contains__(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        return byte < len(self._bitmap) and bool(self._bitmap[byte] & (0x80 >> bit))

    def __len__(self) -> int:
        return int.from_bytes(self._bitmap, "big").bit_count()

    def __iter__(self) -> Iterator[int]:
        return (n for n in range(8 * len(self._bitmap)) if n in self)
