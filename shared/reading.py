"""Reading jobs: their records, the object the API shows, their place in the queue, the list of all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from rq.job import Job
from rq.results import Result

from shared.errors import InternalError, JobNotFound
from shared.names import JOBS_INDEX, PRIORITIES, SERIALIZER, events_key, job_key, queue_name, rq_queue_key
from shared.records import JobRecord, job_object
from shared.stream import Event, TokenStream


class JobReader:
    """All that changes nothing. Safe to share between threads."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self.stream = TokenStream(client)

    def fetch(self, job_id: str) -> JobRecord:
        """The stored job.

        Raises:
            JobNotFound: there is none.
        """
        raw = self.client.hgetall(job_key(job_id))
        if b"origin" not in raw:
            raise JobNotFound(job_id)
        return JobRecord.parse(job_id, raw)

    def fetch_many(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """The stored jobs, None for each that is gone, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hgetall(job_key(job_id))
        return [
            JobRecord.parse(job_id, raw) if b"origin" in raw else None
            for job_id, raw in zip(job_ids, pipe.execute(), strict=True)
        ]

    def view(self, job_id: str) -> dict[str, Any]:
        """The job object: the stored one of an ended job, one made now of any other.

        Raises:
            JobNotFound: there is none.
        """
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(job_key(job_id))
        pipe.xrevrange(events_key(job_id), count=1)
        raw, entries = pipe.execute()
        if b"origin" not in raw:
            raise JobNotFound(job_id)
        record = JobRecord.parse(job_id, raw)
        last = Event.from_entry(entries[0]) if entries else None
        if last is not None and last.is_terminal and record.is_over:
            final: dict[str, Any] = last.json()
            return final
        return self.live_view(record, last)

    def live_view(self, record: JobRecord, last: Event | None = None) -> dict[str, Any]:
        """The job object of a job that has no terminal event (yet)."""
        position = self._position(record) if record.rq_status == "queued" else None
        has_text = record.status != "queued" or (last is not None and last.id.tokens > 0)
        answer = answer_so_far(self.stream.tokens(record.id)) if has_text else {}
        if not record.is_over:
            return job_object(record, position=position, **answer)
        # RQ's own tools ended it and wrote no event.
        ttl_s = self.client.ttl(job_key(record.id))
        return job_object(
            record,
            **answer,
            ttl_s=ttl_s if ttl_s > 0 else None,
            ended_at=record.ended_at or time.time(),
            finish_reason="cancelled" if record.status == "cancelled" else None,
            error=self._rq_error(record.id) if record.status == "failed" else None,
        )

    def _rq_error(self, job_id: str) -> dict[str, Any]:
        """What RQ noted of a failure that was not ours: the last line of the traceback."""
        result = Result.fetch_latest(Job(job_id, connection=self.client, serializer=SERIALIZER), serializer=SERIALIZER)
        lines = (result.exc_string or "").strip().splitlines() if result else []
        return InternalError(lines[-1] if lines else "the job failed outside Slotline").to_dict()

    def _position(self, record: JobRecord) -> int | None:
        ahead = PRIORITIES[: PRIORITIES.index(record.priority)]
        pipe = self.client.pipeline(transaction=False)
        # From the end: a job is looked at most often when it has just been queued.
        pipe.lpos(rq_queue_key(record.origin), record.id, rank=-1)
        for priority in ahead:
            pipe.llen(rq_queue_key(queue_name(record.model, priority)))
        place, *more_urgent = pipe.execute()
        return None if place is None else place + 1 + sum(more_urgent)

    def newest(self, after: str | None = None) -> Iterator[JobRecord]:
        """All stored jobs, newest first, those later than the job `after`; expired ones are skipped.

        Raises:
            JobNotFound: `after` is not in the index.
        """
        start = 0
        if after is not None:
            rank = self.client.zrevrank(JOBS_INDEX, after)
            if rank is None:
                raise JobNotFound(after)
            start = rank + 1
        while ids := [i.decode() for i in self.client.zrevrange(JOBS_INDEX, start, start + 99)]:
            yield from (record for record in self.fetch_many(ids) if record is not None)
            # Jobs that came or went meanwhile have moved the places of all others.
            ranks = (self.client.zrevrank(JOBS_INDEX, job_id) for job_id in reversed(ids))
            start = next((rank + 1 for rank in ranks if rank is not None), start)


def answer_so_far(tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the token events of a job have come to, as fields of its object; all but the text None if there is none."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in (delta for token in tokens for delta in token.get("tool_calls", ())):
        call = calls.setdefault(
            delta["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = delta.get("id") or call["id"]
        call["function"]["name"] = delta["function"].get("name") or call["function"]["name"]
        call["function"]["arguments"] += delta["function"].get("arguments", "")
    return {
        "text": "".join(token["text"] for token in tokens),
        "reasoning_content": "".join(token.get("reasoning_content", "") for token in tokens) or None,
        "tool_calls": [calls[index] for index in sorted(calls)] or None,
        "logprobs": [token["logprobs"] for token in tokens if "logprobs" in token] or None,
    }
