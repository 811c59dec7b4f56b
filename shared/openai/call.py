"""What an answer says of the call it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


@dataclass(frozen=True, slots=True)
class Call:
    """What an answer says of the call itself.

    `id` is ours, without the prefix that each endpoint gives it (`chatcmpl-`, …); `created` counts seconds since
    1970; `model` is the resolved name.
    """

    id: str
    created: int
    model: str
