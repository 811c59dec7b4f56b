"""Following a job: the log first, then the channel, each event once and in order.

The channel is only believed while its events join without a hole; whenever one may be missing, the log is read
from the reader's place. Jobs that ended without an event are found by comparing them with their record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError

from shared.errors import JobNotFound, JobRemoved, SlotlineError
from shared.jobs import JobStore
from shared.records import JobRecord, job_object
from shared.stream import REMOVED, Event, EventId, dumps
from webapi.services import Services
from webapi.subscription import Notice, Subscription

log = logging.getLogger(__name__)

#: How soon a reader that could not read the log tries again.
RETRY_S = 0.5


class Follower:
    """One reader's way through a job's events.

    Args:
        store: where the log and the record are.
        subscription: the job's channel.
        record: the job when the reader came.
        after: the reader's place; START for everything.
        behind: whether the log may have more than the reader's place. Not so where the subscription is older than
            the job.
    """

    def __init__(
        self, store: JobStore, subscription: Subscription, record: JobRecord, after: EventId, *, behind: bool = True
    ) -> None:
        self.subscription = subscription
        self._store = store
        self._record = record
        self._place = after
        self._behind = behind
        self._early: Event | None = None
        self._over = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._over

    @property
    def is_behind(self) -> bool:
        """Whether the log has to be read before anything of the channel."""
        return self._behind

    def doubt(self) -> None:
        """Compare with log and record at the next chance, whatever the channel says."""
        self._behind = True

    def events(self, keep_alive_s: float) -> Iterator[Event | None]:
        """The events after the reader's place; see `follow_all`."""
        for news in follow_all([self], keep_alive_s):
            yield news and news[1]

    def news(self) -> Iterator[Event]:
        """What there is now, without waiting. It is still behind after that if the log cannot be read."""
        while not self._over:
            try:
                if self._behind:
                    yield from self._catch_up()
            except RedisError as error:
                log.debug("a stream waits for Redis: %s", error)
                self._over = self.subscription.is_shut
                return
            if self._over or not (yield from self._from_channel()):
                return

    def _from_channel(self) -> Generator[Event, None, bool]:
        """The next event of the channel, if it joins what came before; False where there is nothing more now."""
        got = self.subscription.get(0)
        if got is Notice.CLOSED:
            self._over = True
        elif got is Notice.GAP or isinstance(got, Event) and got.name == REMOVED:
            self._behind = True
        elif isinstance(got, Event) and (got.is_terminal or got.id > self._place):
            if self._joins(got):
                yield self._passed(got)
            else:
                self._behind, self._early = True, got
        return got is not Notice.SILENCE

    def _passed(self, event: Event) -> Event:
        self._place = event.id
        self._over = event.is_terminal
        return event

    def _joins(self, event: Event) -> bool:
        """Whether an event comes right after the reader's place."""
        return event.id in (EventId(self._place.tokens + 1, 0), EventId(self._place.tokens, self._place.step + 1))

    def _catch_up(self) -> Iterator[Event]:
        """What the log has after the reader's place, and the end if the job is over.

        The record is read before the log: if it says that the job is over, the log is complete.
        """
        record = self._stored()
        for event in self._missed(record):
            yield self._passed(event)
            if self._over:
                return
        self._behind = False

    def _missed(self, record: JobRecord | None) -> Iterator[Event]:
        yield from self._store.stream.replay(self._record.id, self._place)
        early, self._early = self._early, None
        if early is not None and (early.is_terminal or early.id > self._place):
            yield early  # its log has expired meanwhile
        if record is None or record.is_over:
            yield self._end(record)

    def _stored(self) -> JobRecord | None:
        try:
            return self._store.fetch(self._record.id)
        except JobNotFound:
            return None

    def _end(self, record: JobRecord | None) -> Event:
        """The terminal event of a job that is over and whose log did not just give one."""
        last = self._store.stream.last(self._record.id)
        if last is not None and last.is_terminal:
            return last  # the reader claims to have tokens that were never made
        job = _removed(self._record) if record is None else self._store.live_view(record, last)
        name = "failed" if job["status"] == "failed" else "done"
        return Event(EventId(self._place.tokens, self._place.step + 1), name, dumps(job))


def follow_all(followers: Sequence[Follower], keep_alive_s: float) -> Iterator[tuple[int, Event] | None]:
    """The events of jobs whose subscriptions have one inbox, as they come, each with the number of its job.

    The terminal event of each job is its last. None comes after each `keep_alive_s` of silence. Ends when all jobs
    have, or without their ends when their subscriptions are shut. While Redis cannot be reached nothing but None
    comes, and then the rest without a gap.
    """
    inbox = followers[0].subscription.inbox
    going = {follower.subscription: (number, follower) for number, follower in enumerate(followers)}
    stirred = list(going)
    quiet_since = time.monotonic()
    while True:
        for number, follower in [going[subscription] for subscription in stirred]:
            for event in follower.news():
                yield number, event
                quiet_since = time.monotonic()
            if follower.is_over:
                del going[follower.subscription]
        if not going:
            return
        left_s = quiet_since + keep_alive_s - time.monotonic()
        if left_s > 0:
            behind = [s for s in stirred if s in going and going[s][1].is_behind]
            found = inbox.wait(min(left_s, RETRY_S) if behind else left_s)
            stirred = [s for s in dict.fromkeys([*behind, *found]) if s in going]
            continue
        for _, follower in going.values():
            follower.doubt()
        yield None
        quiet_since = time.monotonic()
        stirred = list(going)


def _removed(record: JobRecord) -> dict[str, Any]:
    error = JobRemoved(f"job {record.id!r} was removed while it was being followed")
    return job_object(record, status="failed", ended_at=time.time(), error=error.to_dict())


def wait_for_end(services: Services, job_id: str, wait_s: float, gone: Callable[[], bool]) -> dict[str, Any] | None:
    """The job once it is over; None if it is not within `wait_s`, or nobody waits any more.

    Also None where waiting is not possible now: the job is queued, and that answer must not be lost.
    """
    deadline = time.monotonic() + wait_s
    try:
        with services.hub.open(job_id) as subscription:
            while not services.store.fetch(job_id).is_over:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or gone():
                    return None
                got = _next_end(subscription, min(left_s, services.settings.keep_alive_s))
                if isinstance(got, Event):
                    job: dict[str, Any] = got.json()
                    return job
                if got is Notice.CLOSED:
                    return None
            return services.store.view(job_id)
    except (RedisError, SlotlineError) as error:
        log.debug("waiting for job %s ended early: %s", job_id, error)
        return None


def _next_end(subscription: Subscription, wait_s: float) -> Event | Notice:
    """The terminal event, or a notice that it is time to look at the record."""
    deadline = time.monotonic() + wait_s
    while True:
        got = subscription.get(max(0.0, deadline - time.monotonic()))
        if isinstance(got, Event) and got.name == REMOVED:
            return Notice.GAP
        if not isinstance(got, Event) or got.is_terminal:
            return got
