"""Pages of jobs, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from shared.errors import InvalidRequest, JobNotFound
from shared.jobs import JobStore
from shared.names import Priority, events_key
from shared.records import JobRecord, job_object
from shared.schemas import JobStatus
from shared.stream import Event
from webapi.describe import Query
from webapi.services import Services

#: Most jobs looked at for one page. A filter that few jobs pass gives a short page, and `next` goes on from there.
LOOK_LIMIT = 5000


class ListQuery(Query):
    """Which jobs, and where to begin."""

    status: JobStatus | None = None
    model: str | None = Field(None, description="Name or alias.")
    priority: Priority | None = None
    limit: int = Field(20, ge=1, le=100)
    after: str | None = Field(None, description="`next` of the page before.")


def job_page(services: Services, query: ListQuery) -> dict[str, Any]:
    """One page of the jobs that pass the filters.

    Raises:
        InvalidRequest: there is no job `after`.
    """
    found: list[JobRecord] = []
    last, more = None, False
    model = _model_name(services, query.model)
    try:
        for looked, record in enumerate(services.store.newest(query.after)):
            if len(found) == query.limit or looked == LOOK_LIMIT:
                more = True
                break
            last = record.id
            if _passes(record, query, model):
                found.append(record)
    except JobNotFound:
        raise InvalidRequest(f"there is no job {query.after!r} to go on after", "after") from None
    return {"object": "list", "data": _shown(services.store, found), "has_more": more, "next": last if more else None}


def _model_name(services: Services, asked: str | None) -> str | None:
    if asked is None:
        return None
    return next((card.name for card in services.registry.models() if asked == card.alias), asked)


def _passes(record: JobRecord, query: ListQuery, model: str | None) -> bool:
    return (
        query.status in (None, record.status)
        and query.priority in (None, record.priority)
        and model in (None, record.model)
    )


def _shown(store: JobStore, records: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """The job objects without text and without their place in the queue, in one round trip."""
    pipe = store.client.pipeline(transaction=False)
    for record in records:
        pipe.xrevrange(events_key(record.id), count=1)
    return [_one(record, entries) for record, entries in zip(records, pipe.execute(), strict=True)]


def _one(record: JobRecord, entries: list[Any]) -> dict[str, Any]:
    last = Event.from_entry(entries[0]) if entries else None
    if last is not None and last.is_terminal and record.is_over:
        return {**last.json(), "text": None, "webhook": record.webhook}
    return job_object(record)
