"""Feeding jobs in gradually and taking them out as they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from shared.errors import JobAlreadyEnded, JobNotFound
from shared.jobs import JobStore
from shared.lua import script
from shared.names import JOBS_INDEX, events_key, feed_key, job_key
from shared.records import JobRecord
from shared.schemas import JobRequest
from shared.stream import Event

#: What tells whether a job is over.
STATE_FIELDS = ("status", "sl_end", "origin")

#: RQ's own tools end jobs without ringing our bell, so all that are out are looked at this often.
LOOK_S = 5.0

#: Most jobs in one round trip or script call, so that others get their turn at Redis.
CHUNK = 256


class Feed:
    """Jobs of one owner, told apart by the feed's name. One thread only.

    Ids of jobs are the owner's: to submit one twice changes nothing, so that an owner that lost its place submits again
    whatever it has no result of. A job stays, with its result, until it is discarded.

    Every method raises redis-py's own errors when Redis cannot be reached, and may then be called again.
    """

    def __init__(self, store: JobStore, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._client = store.client
        self._clock = clock
        self._discard = script(store.client, "discard")
        #: Jobs that are neither discarded nor withdrawn, and those of them that may have ended before we came.
        self._out: dict[str, None] = {}
        self._found: dict[str, None] = {}
        self._next_look = clock() + LOOK_S
        self.name = name

    def submit(self, job_id: str, request: JobRequest, model: str, parent: str | None = None) -> None:
        """Queue a job, or find it there.

        Raises:
            QueueFull: the model takes no more jobs now.
            IdConflict: the id belongs to a job with another body.
        """
        named = request.model_copy(update={"id": job_id})
        submitted = self._store.submit(named, model, parent=parent, notify=feed_key(self.name))
        self._out[job_id] = None
        if not submitted.created:
            self._found[job_id] = None

    def find(self, job_ids: Iterable[str]) -> list[str]:
        """Those of the jobs that there are; they count as submitted."""
        found = [job_id for job_id, record in self._states(job_ids) if record is not None]
        self._out |= dict.fromkeys(found)
        self._found |= dict.fromkeys(found)
        return found

    def ended(self, wait_s: float, count: int = 256) -> list[str]:
        """Ids of jobs that have ended or are gone; waits at most `wait_s` for the first. An id may come twice.

        `wait_s` has to be shorter than `redis_timeout_s`.
        """
        return self._looked_up() or self._pop(wait_s, count)

    def _pop(self, wait_s: float, count: int) -> list[str]:
        key = feed_key(self.name)
        if wait_s > 0:
            reply = self._client.blmpop(wait_s, 1, key, direction="LEFT", count=count)
        else:
            reply = self._client.lmpop(1, key, direction="LEFT", count=count)
        return [job_id.decode() for job_id in reply[1]] if reply else []

    def _looked_up(self) -> list[str]:
        """What has ended without a word to us, of those found and, every few seconds, of all."""
        due = self._clock() >= self._next_look
        over = [job_id for job_id, record in self._states(self._out if due else self._found) if _is_over(record)]
        if due:
            self._next_look = self._clock() + LOOK_S
        self._found.clear()
        return over

    def _states(self, job_ids: Iterable[str]) -> Iterator[tuple[str, JobRecord | None]]:
        for chunk in _chunks(job_ids):
            pipe = self._client.pipeline(transaction=False)
            for job_id in chunk:
                pipe.hmget(job_key(job_id), STATE_FIELDS)
            for job_id, values in zip(chunk, pipe.execute(), strict=True):
                yield job_id, _state(job_id, values)

    def finals(self, job_ids: Iterable[str]) -> dict[str, dict[str, Any] | None]:
        """The job objects of those that are over, in one round trip; None for a job that is gone."""
        found: dict[str, dict[str, Any] | None] = {}
        for chunk in _chunks(job_ids):
            pipe = self._client.pipeline(transaction=False)
            for job_id in chunk:
                pipe.hmget(job_key(job_id), STATE_FIELDS)
                pipe.xrevrange(events_key(job_id), count=1)
            replies = pipe.execute()
            for job_id, values, entries in zip(chunk, replies[::2], replies[1::2], strict=True):
                record = _state(job_id, values)
                if _is_over(record):
                    found[job_id] = self._final(record, entries) if record else None
        return found

    def _final(self, record: JobRecord, entries: Sequence[Any]) -> dict[str, Any] | None:
        last = Event.from_entry(entries[0]) if entries else None
        if last is not None and last.is_terminal:
            final: dict[str, Any] = last.json()
            return final
        # RQ's own tools ended it and wrote no event.
        full = self._store.fetch_many([record.id])[0]
        return self._store.live_view(full, last) if full else None

    def mark(self, job_ids: Iterable[str]) -> None:
        """Note that jobs are to be discarded, in case we die before we have."""
        if names := list(job_ids):
            self._client.sadd(marked_key(self.name), *names)

    def marked(self) -> list[str]:
        """The jobs so noted and not yet discarded."""
        return [job_id.decode() for job_id in self._client.smembers(marked_key(self.name))]

    def unmark(self, job_ids: Iterable[str]) -> None:
        """Undo `mark`."""
        if names := list(job_ids):
            self._client.srem(marked_key(self.name), *names)

    def discard(self, job_ids: Iterable[str]) -> list[str]:
        """Remove every trace of jobs that are over, and return the ids of those that are not.

        Among them may be, for some milliseconds, jobs that have ended but that their worker has yet to record.
        """
        return self._remove("over", job_ids)

    def withdraw(self, job_ids: Iterable[str]) -> list[str]:
        """Remove every trace of jobs that still wait in the queue, and return the ids of those that do not."""
        return self._remove("waiting", job_ids)

    def cancel(self, job_ids: Iterable[str]) -> list[str]:
        """Cancel jobs that wait or run, to hear no more of them, and return the ids of those that ended before.

        From now on none of the others can complete, though a worker may take a moment to let go of it.
        """
        ended = []
        for job_id in self.withdraw(job_ids):
            try:
                self._store.cancel(job_id)
            except JobAlreadyEnded:
                ended.append(job_id)
            except JobNotFound:
                continue  # somebody else has removed it: there is nothing left to cancel, and no bell to silence
            else:
                # The bell would ring in a list that nobody reads or deletes any more.
                self._client.hdel(job_key(job_id), "sl_notify")
        return ended

    def _remove(self, which: str, job_ids: Iterable[str]) -> list[str]:
        stay: list[str] = []
        keys = [JOBS_INDEX, marked_key(self.name)]
        for chunk in _chunks(job_ids):
            stay += (job_id.decode() for job_id in self._discard(keys=keys, args=[which, *chunk]))
            for job_id in set(chunk).difference(stay):
                self._out.pop(job_id, None)
                self._found.pop(job_id, None)
        return stay

    def close(self) -> None:
        """Forget which jobs ended. The jobs themselves are left as they are."""
        self._client.delete(feed_key(self.name), marked_key(self.name))
        self._out.clear()
        self._found.clear()


def marked_key(name: str) -> str:
    """The set of jobs of a feed that are to be discarded."""
    return f"{feed_key(name)}:marked"


def _state(job_id: str, values: Sequence[bytes | None]) -> JobRecord | None:
    raw = {name.encode(): value for name, value in zip(STATE_FIELDS, values, strict=True) if value is not None}
    return JobRecord.parse(job_id, raw) if b"origin" in raw else None


def _is_over(record: JobRecord | None) -> bool:
    return record is None or record.is_over


def _chunks(job_ids: Iterable[str]) -> Iterator[list[str]]:
    left = iter(list(job_ids))
    while chunk := list(islice(left, CHUNK)):
        yield chunk
