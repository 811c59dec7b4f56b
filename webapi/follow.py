"""Following a job: the log first, then the channel, each event once and in order.

The channel is only believed while its events join without a hole; whenever one may be missing, the log is read
from the reader's place. Jobs that ended without an event are found by comparing them with their record. Where the log
itself has a hole, since it has expired or lost its head, a `gap` stands for what is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from redis.exceptions import RedisError

from shared.errors import JobNotFound, JobRemoved, SlotlineError
from shared.jobs import JobStore
from shared.records import JobRecord, job_object
from shared.stream import PROGRESS, QUEUED, REMOVED, Event, EventId, dumps
from webapi.services import Services
from webapi.subscription import Notice, Subscription

log = logging.getLogger(__name__)

#: How soon a reader that could not read the log tries again.
RETRY_S = 0.5

#: How long the worker of a running job has to write a log anew that has a hole, or to register the job again, as after
#: a Redis that came back without its last seconds. A reader that still misses something then gets a `gap`, or the end.
REWRITE_S = 10.0

#: Most events that are passed on together, and so written in one piece.
AT_ONCE = 64

#: Events that came together, each with the number of its job.
News = list[tuple[int, Event]]


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
        self._last: str | None = None
        self._lacking_since: float | None = None
        self._is_removed = False
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

    def events(self, keep_alive_s: float) -> Iterator[list[Event]]:
        """The events after the reader's place; see `follow_all`."""
        for news in follow_all([self], keep_alive_s):
            yield [event for _, event in news]

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
            if self._over:
                return
            got = self.subscription.take()
            if isinstance(got, Event):
                if self._is_next(got):
                    yield self._passed(got)
                elif self._is_timely(got):
                    yield got
            elif got is Notice.SILENCE:
                return
            elif got is Notice.CLOSED:
                self._over = True
            else:
                self._behind = True

    def _is_next(self, event: Event) -> bool:
        """Whether an event of the channel comes right after the reader's place. If it is later, the log comes first."""
        (tokens, step), (place, at) = event.id, self._place
        if (step == 0 and tokens == place + 1) or (tokens == place and step == at + 1):
            return True
        if event.name == REMOVED:
            self._behind = self._is_removed = True
        elif event.is_terminal or event.id > self._place:
            self._behind, self._early = True, event
        return False

    def _is_timely(self, event: Event) -> bool:
        """Whether an event that has no place says something that the reader does not know to be over."""
        if event.name == QUEUED:
            return self._last in (None, "paused")
        return event.name == PROGRESS and self._last in ("started", "resumed")

    def _passed(self, event: Event) -> Event:
        self._place, self._last = event.id, event.name
        self._over = event.is_terminal
        return event

    def _catch_up(self) -> Iterator[Event]:
        """What the log has after the reader's place, and the end if the job is over.

        The record is read before the log: if it says that the job is over, the log is complete.
        """
        record = self._stored()
        for event in self._missed(record):
            yield self._passed(event)
            if self._over:
                return
        if self._lacking_since is None:
            self._behind, self._early = False, None

    def _missed(self, record: JobRecord | None) -> Iterator[Event]:
        is_over = record is None or record.is_over
        end: Event | None = None
        for event in chain(self._store.stream.replay(self._record.id, self._place), self._unlogged()):
            if event.is_terminal:
                end = event
                break
            if not self._joins(event):
                if is_over:
                    break
                if not self._has_waited():
                    return
                yield _gap(event.id.tokens - (event.id.step == 0), {})
            self._lacking_since = None
            yield event
        if record is None and end is None and not self._is_removed and not self._has_waited():
            return  # a worker may hold it and register it again
        self._lacking_since = None
        if is_over or end is not None:
            yield from self._ends(record, end)

    def _unlogged(self) -> Iterator[Event]:
        """What came on the channel and should have been in the log, which has expired or been cut meanwhile."""
        early = self._early
        if early is not None and (early.is_terminal or early.id > self._place):
            yield early

    def _joins(self, event: Event) -> bool:
        """Whether no token is missing before an event that comes after the reader's place."""
        return event.id.tokens - (event.id.step == 0) <= self._place.tokens

    def _has_waited(self) -> bool:
        now = time.monotonic()
        self._lacking_since = self._lacking_since or now
        return now - self._lacking_since >= REWRITE_S

    def _stored(self) -> JobRecord | None:
        try:
            return self._store.fetch(self._record.id)
        except JobNotFound:
            return None

    def _ends(self, record: JobRecord | None, end: Event | None) -> Iterator[Event]:
        """The terminal event of a job that is over, after a `gap` if the reader has not had all before it."""
        logged = end or self._store.stream.last(self._record.id)
        if logged is not None and logged.is_terminal:
            # Where it has fewer tokens than the place, the reader claims to have tokens that were never made.
            if logged.id.tokens > self._place.tokens:
                yield _gap(logged.id.tokens, logged.json())
            yield logged
            return
        if record is None:
            job = _removed(self._record)
        else:
            job = self._store.live_view(record, logged)
            yield from self._lost(job, logged)
        name = "failed" if job["status"] == "failed" else "done"
        yield Event(EventId(self._place.tokens, self._place.step + 1), name, dumps(job))

    def _lost(self, job: Mapping[str, Any], logged: Event | None) -> Iterator[Event]:
        """A `gap` where a job that is over has an answer that the log, which goes up to `logged`, no longer has."""
        if job["usage"] is not None and job["text"]:
            tokens = job["usage"]["completion_tokens"]
            # The usage does not count the token event of what was held back to the very end.
            if tokens >= self._place.tokens:
                yield _gap(tokens, job)
        elif logged is not None and logged.id.tokens > self._place.tokens:
            yield _gap(logged.id.tokens, {})


def _gap(tokens: int, job: Mapping[str, Any]) -> Event:
    """Stands for all tokens before the index `tokens`, with the text of the job as far as it is known."""
    texts = {name: job.get(name) for name in ("text", "reasoning_content", "tool_calls")}
    return Event(EventId(tokens, 0), "gap", dumps({"tokens": tokens, **texts}))


def follow_all(followers: Sequence[Follower], keep_alive_s: float) -> Iterator[News]:
    """The events of jobs whose subscriptions have one inbox: what there is at a time, each with the number of its job.

    The terminal event of each job is its last. An empty list comes after each `keep_alive_s` of silence. Ends when all
    jobs have, or without their ends when their subscriptions are shut. While Redis cannot be reached nothing but
    empty lists comes, and then the rest without a gap.
    """
    inbox = followers[0].subscription.inbox
    going = {follower.subscription: (number, follower) for number, follower in enumerate(followers)}
    stirred = list(going)
    quiet_since = time.monotonic()
    while True:
        news = _all_news([going[subscription] for subscription in stirred])
        while found := list(islice(news, AT_ONCE)):
            yield found
            quiet_since = time.monotonic()
        for subscription in stirred:
            if going[subscription][1].is_over:
                del going[subscription]
        if not going:
            return
        left_s = quiet_since + keep_alive_s - time.monotonic()
        if left_s > 0:
            behind = [s for s in stirred if s in going and going[s][1].is_behind]
            woken = inbox.wait(min(left_s, RETRY_S) if behind else left_s)
            stirred = [s for s in dict.fromkeys([*behind, *woken]) if s in going]
            continue
        for _, follower in going.values():
            follower.doubt()
        yield []
        quiet_since = time.monotonic()
        stirred = list(going)


def _all_news(followers: Sequence[tuple[int, Follower]]) -> Iterator[tuple[int, Event]]:
    for number, follower in followers:
        for event in follower.news():
            yield number, event


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
