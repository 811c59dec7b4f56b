"""Reading jobs: their records, the object the API shows, their place in the queue, the list of all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from rq.job import Job
from rq.results import Result

from shared.ahead import Ahead
from shared.errors import InternalError, JobNotFound
from shared.names import JOBS_INDEX, SERIALIZER, events_key, job_key
from shared.records import JobRecord, job_object
from shared.stream import Event, TokenStream


@dataclass(frozen=True, slots=True)
class Said:
    """What a job has come to: the tokens its log goes up to, and what they are as fields of its object."""

    tokens: int
    answer: dict[str, Any]


class JobReader:
    """All that changes nothing. Safe to share between threads."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self.stream = TokenStream(client)
        self.ahead = Ahead(client)

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
            # The log is fixed, and webhooks are sent after the end.
            return {**final, "webhook": record.webhook}
        return self.live_view(record, last)

    def live_view(self, record: JobRecord, last: Event | None = None) -> dict[str, Any]:
        """The job object of a job that has no terminal event (yet, or any more)."""
        result = self._rq_result(record.id) if record.is_over else None
        if (final := _final_in(result, record)) is not None:
            # The log has expired before the record.
            return {**final, "webhook": record.webhook}
        ahead = self.ahead.of(record.id) if record.rq_status == "queued" else None
        has_text = record.status != "queued" or (last is not None and last.id.tokens > 0)
        answer = answer_so_far(self.stream.tokens(record.id)) if has_text else {}
        if not record.is_over:
            return job_object(record, position=None if ahead is None else ahead + 1, **answer)
        # RQ's own tools ended it and wrote no event.
        ttl_s = self.client.ttl(job_key(record.id))
        return job_object(
            record,
            **answer,
            ttl_s=ttl_s if ttl_s > 0 else None,
            ended_at=record.ended_at or time.time(),
            finish_reason="cancelled" if record.status == "cancelled" else None,
            error=_rq_error(result) if record.status == "failed" else None,
        )

    def said(self, record: JobRecord) -> Said:
        """What a job that no worker has now has said so far."""
        # One that was queued again after its end says everything anew, and what no worker has taken has no log.
        events = list(self.stream.replay(record.id)) if record.attempts and record.end is None else []
        tokens = [event.json() for event in events if event.name == "token"]
        return Said(events[-1].id.tokens if events else 0, answer_so_far(tokens) if tokens else {})

    def _rq_result(self, job_id: str) -> Result | None:
        """What RQ's record has of the job's last end."""
        return Result.fetch_latest(Job(job_id, connection=self.client, serializer=SERIALIZER), serializer=SERIALIZER)

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


def _final_in(result: Result | None, record: JobRecord) -> dict[str, Any] | None:
    """The job object that RQ has stored of a completed job, if it is of this end and not of an earlier one."""
    value = result.return_value if result is not None else None
    if not isinstance(value, dict) or (value.get("status"), value.get("attempts")) != (record.status, record.attempts):
        return None
    return value


def _rq_error(result: Result | None) -> dict[str, Any]:
    """What RQ noted of a failure that was not ours: the last line of the traceback."""
    lines = (result.exc_string or "").strip().splitlines() if result else []
    return InternalError(lines[-1] if lines else "the job failed outside Slotline").to_dict()


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
