"""Files and batches as the API takes and shows them, in the shapes of OpenAI's."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from shared.openai.exchange import Endpoint
from shared.schemas import Strict
from shared.webhooks.state import WebhookState
from shared.webhooks.url import WebhookUrl

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
#: States that nothing follows, unless the failed lines are run again.
ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")

#: Files are kept for an hour at least and for 30 days at most. *Source:* OpenAI's API reference, `expires_after`.
TtlSeconds = Annotated[int, Field(ge=3600, le=2_592_000)]

WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
HOUR_S, DAY_S = 3600, 86_400
LONGEST_WINDOW_S = 30 * DAY_S


def window_seconds(window: str) -> int:
    """The length of a completion window such as `24h` or `7d`.

    Raises:
        ValueError: it is written otherwise, or longer than 30 days.
    """
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * (HOUR_S if found[2] == "h" else DAY_S) if found else 0
    if not 0 < seconds <= LONGEST_WINDOW_S:
        raise ValueError("must be hours or days such as 24h or 7d, at most 30d")
    return seconds


class ExpiresAfter(Strict):
    """When a file expires: so many seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: TtlSeconds


class BatchRequest(Strict):
    """A new batch."""

    input_file_id: str = Field(min_length=1, max_length=128, description="A file uploaded with the purpose `batch`.")
    endpoint: Endpoint = Field(description="Where each line of the file would be sent.")
    completion_window: str = Field(
        description="Hours or days, such as `24h` or `7d`, at most `30d`. What has not run by then expires."
    )
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="Up to 16 pairs of text, kept with the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When the results expire; left out, with the batch."
    )
    webhook_url: WebhookUrl | None = Field(None, description="Told, by a signed POST, when the batch has ended.")

    @field_validator("completion_window")
    @classmethod
    def _known_window(cls, value: str) -> str:
        window_seconds(value)
        return value


class RequestCounts(Strict):
    """Lines of a batch. `completed + failed` never falls and never passes `total`."""

    total: int
    completed: int
    failed: int


class BatchError(Strict):
    """Why a batch failed: what is wrong with the file, or with one line of it."""

    code: str
    line: int | None = Field(description="Number of the line in the file, from 1; null for the file itself.")
    message: str
    param: str | None


class BatchErrors(Strict):
    """What was found wrong in the input file."""

    object: Literal["list"]
    data: list[BatchError]


class CachedTokens(Strict):
    """Of the prompts' tokens, those that had not to be computed again."""

    cached_tokens: int


class ReasoningTokens(Strict):
    """Of the answers' tokens, those of the reasoning."""

    reasoning_tokens: int


class BatchUsage(Strict):
    """Tokens of all lines so far."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(Strict):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    paused: bool = Field(description="Nothing more of it is started until it is resumed.")
    output_file_id: str | None = Field(description="From the first answer on; null where there is none.")
    error_file_id: str | None = Field(description="From the first failed line on; null where there is none.")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None
    webhook: WebhookState | None = Field(description="What became of the webhook to `webhook_url`.")


class BatchList(Strict):
    """Batches, newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileObject(Strict):
    """A file. Times are seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(Strict):
    """Files, newest first unless asked otherwise."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Strict):
    """Answer to a delete."""

    id: str
    object: Literal["file"]
    deleted: bool
