"""The header with which a caller may repeat a request whose answer was lost."""

from __future__ import annotations

import re

from pydantic import Field

from shared.errors import InvalidRequest
from webapi.describe import Parameters

_KEY = re.compile(r"[\x20-\x7e]{1,255}")


class IdempotencyHeader(Parameters):
    """Headers of a request that makes something."""

    idempotency_key: str | None = Field(
        None,
        alias="Idempotency-Key",
        description="1 to 255 printable ASCII characters. The same key with the same body means the same thing made.",
    )

    @property
    def checked_key(self) -> str | None:
        """The key, if there is one.

        Raises:
            InvalidRequest: it is empty, too long or not printable ASCII.
        """
        if self.idempotency_key is not None and not _KEY.fullmatch(self.idempotency_key):
            raise InvalidRequest("`Idempotency-Key` must be 1 to 255 printable ASCII characters", "Idempotency-Key")
        return self.idempotency_key
