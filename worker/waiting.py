"""The requests that wait for a slot of this engine: new ones, and those that had one and were paused."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.requests import Request


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A request's place in line: by rank, then by when it came. A paused one comes back to its own."""

    rank: int
    came: int
    request: Request = field(compare=False)
    #: When a more urgent request took its slot over; None if none did.
    displaced_at: float | None = field(default=None, compare=False)


class WaitingLine:
    """Requests by their place, the next one first."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._came = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return (place.request for place in self._places)

    @property
    def places(self) -> list[Place]:
        """All places as they are now; the line may change meanwhile."""
        return list(self._places)

    def add(self, request: Request) -> None:
        """Put a new request behind those of its rank."""
        self._came += 1
        self.put(Place(request.priority if request.rank is None else request.rank, self._came, request))

    def put(self, place: Place) -> None:
        """Put a request at its place."""
        insort(self._places, place)

    def remove(self, place: Place) -> None:
        """Take a request out of the line."""
        self._places.remove(place)

    def find(self, execution: str) -> Place | None:
        """The place of an execution's request; None if it does not wait."""
        return next((place for place in self._places if place.request.execution == execution), None)

    def next(self) -> Place:
        """Take the first request out."""
        return self._places.pop(0)
