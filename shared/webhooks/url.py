"""Which URLs a webhook may go to, as far as the URL itself tells."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

MAX_LENGTH = 2048

#: What a URL is written with. Parsers disagree about a backslash, so there is none.
_WRITTEN = re.compile(r"[!-\[\]-~]+")


def _check(value: str) -> str:
    if not _WRITTEN.fullmatch(value):
        raise ValueError("must be written in ASCII without spaces or backslashes; percent-encode the rest")
    try:
        parts = urlsplit(value)
        port = parts.port
        (parts.hostname or "").encode("idna")  # raises UnicodeError, a ValueError, where no resolver would take it
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError("must begin with http:// or https://")
    if not parts.hostname or port == 0:
        raise ValueError("must name a host, and no port 0")
    if "@" in parts.netloc:
        raise ValueError("must hold no user name or password")
    if "#" in value:
        raise ValueError("must have no fragment, which would not be sent")
    return value


WebhookUrl = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH), AfterValidator(_check)]
