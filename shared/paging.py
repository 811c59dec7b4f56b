"""Walking through an index: a sorted set of ids by the time they were made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Ids that are read in one round trip.
PAGE = 200


def pages(client: Any, index: str, after: str | None = None, oldest_first: bool = False) -> Iterator[list[str]]:
    """The ids of an index, some at a time, newest first or oldest first, those behind the id `after`.

    What is added or removed meanwhile makes none of the others come twice or be left out.

    Raises:
        KeyError: `after` is not in the index.
    """
    rank = client.zrank if oldest_first else client.zrevrank
    members = client.zrange if oldest_first else client.zrevrange
    start = 0
    if after is not None:
        at = rank(index, after)
        if at is None:
            raise KeyError(after)
        start = at + 1
    while ids := [raw.decode() for raw in members(index, start, start + PAGE - 1)]:
        yield ids
        # Those that came or went meanwhile have moved the places of all others.
        ranks = (rank(index, one) for one in reversed(ids))
        start = next((at + 1 for at in ranks if at is not None), start)
