"""One call of an OpenAI-style endpoint: its jobs are queued and followed, and end with it.

The order: everything that can be refused is refused; then the call subscribes to its jobs, so that nothing has to be
read again from their logs; then they are queued. The first failure of one job ends the others. Unless the call is
meant to go on in the background, its jobs are bound to the caller's connection and to this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from shared.errors import SlotlineError, Unavailable
from shared.names import DEFAULT_MODEL
from shared.openai.embeddings import EmbeddingExchange
from shared.openai.exchange import Call, Exchange, failure_of
from shared.records import JobRecord
from shared.schemas import JobRequest
from shared.stream import START, Event
from webapi.admission import admit_call
from webapi.callers import caller_is_gone, connection_of
from webapi.follow import Follower, News, follow_all
from webapi.services import Services
from webapi.subscription import Subscription

#: Most ids of jobs in a header: proxies take headers of a few kilobytes.
MAX_LISTED_IDS = 64

#: Jobs that are queued in one round trip; between two of them other requests have their turn.
SUBMITTED_AT_ONCE = 64


class CallerLeft(Exception):
    """Nobody waits for the answer any more."""


class OpenCall:
    """A call whose jobs are queued. Close it in the end: whatever still runs for the caller alone is cancelled.

    Attributes:
        about: what the answer says of the call.
        finals: the objects of the completed jobs so far, by number of the choice.
    """

    def __init__(self, services: Services, exchange: Exchange, environ: dict[str, Any]) -> None:
        """Check, subscribe and queue.

        Raises:
            SlotlineError: the call is refused, and nothing is queued.
            CallerLeft: nobody waits for it.
        """
        self.exchange = exchange
        self.finals: dict[int, dict[str, Any]] = {}
        self._services = services
        self._bound = None if exchange.background else services.bound.id
        self._unended: set[str] = set()
        self._caller_left = False
        self._cleanup = ExitStack()
        self._id = services.hub.new_id()
        self._jobs = _named(self._id, exchange.jobs())
        self.about = Call(self._id, int(time.time()), self._admit())
        try:
            subscriptions = self._attach(environ)
            self._submit()
            self._followers = self._follow(subscriptions)
        except BaseException:
            self.abandon()
            self.close()
            raise

    @property
    def job_ids(self) -> str:
        """The ids of the jobs, in the order of the choices; of very many, what all of theirs begin with."""
        ids = [str(job.id) for job in self._jobs]
        return ", ".join(ids) if len(ids) <= MAX_LISTED_IDS else self._id

    @property
    def choices(self) -> int:
        """How many jobs it has."""
        return len(self._jobs)

    @property
    def ordered(self) -> list[dict[str, Any]]:
        """The job objects in the order of the choices."""
        return [self.finals[number] for number in sorted(self.finals)]

    def news(self) -> Iterator[News]:
        """The events of the jobs as they come, each with the number of its choice; none after a while of silence.

        Raises:
            SlotlineError: a job has failed, and the others are cancelled; or the server is stopping.
            CallerLeft: nobody waits for more.
        """
        for together in follow_all(self._followers, self._services.settings.keep_alive_s):
            for place, (number, event) in enumerate(together):
                if event.is_terminal and (error := self._ended(number, event)) is not None:
                    if place:
                        yield together[:place]
                    self.abandon()
                    raise error
            yield together
        if self._caller_left:
            raise CallerLeft
        if len(self.finals) < len(self._jobs):
            lives_on = "; the jobs go on: see /v1/jobs" if self._bound is None else ""
            raise Unavailable(f"the server is stopping{lives_on}")

    def answer(self) -> dict[str, Any]:
        """The whole answer, as soon as there is one.

        Raises:
            SlotlineError, CallerLeft: as `news`.
        """
        for _ in self.news():
            pass
        return self.exchange.answer(self.about, self.ordered)

    def abandon(self) -> None:
        """Cancel the jobs that have not ended."""
        unended, self._unended = self._unended, set()
        self._services.bound.end(sorted(unended))

    def close(self) -> None:
        """Let go of everything; more than once is fine."""
        if self._bound is not None:
            self.abandon()
        self._cleanup.close()

    def _admit(self) -> str:
        """The name of the model. A call in the background waits for a worker, as any job does."""
        card = admit_call(self._services, self._jobs, must_be_live=self._bound is not None)
        if card is None:
            return DEFAULT_MODEL
        if isinstance(self.exchange, EmbeddingExchange):
            self.exchange.check(card.n_embd)
        return card.name

    def _attach(self, environ: dict[str, Any]) -> list[Subscription]:
        """Subscribe, watch the caller, hold the lease."""
        subscriptions = self._services.hub.open_all([str(job.id) for job in self._jobs])
        for subscription in subscriptions:
            self._cleanup.callback(subscription.close)
        connection = connection_of(environ)
        if connection is not None:
            self._caller_left = caller_is_gone(environ)
            self._services.watch.add(connection, lambda: self._leave(subscriptions))
            self._cleanup.callback(self._services.watch.remove, connection)
        if self._bound is not None:
            self._services.bound.enter()
            self._cleanup.callback(self._services.bound.leave)
        return subscriptions

    def _leave(self, subscriptions: list[Subscription]) -> None:
        self._caller_left = True
        for subscription in subscriptions:
            subscription.shut()

    @property
    def _parent(self) -> str | None:
        return self._id if len(self._jobs) > 1 else None

    def _submit(self) -> None:
        for at in range(0, len(self._jobs), SUBMITTED_AT_ONCE):
            if self._caller_left and self._bound is not None:
                raise CallerLeft
            jobs = self._jobs[at : at + SUBMITTED_AT_ONCE]
            # A submit whose reply is lost may have queued the jobs.
            self._unended.update(str(job.id) for job in jobs)
            self._services.store.submit_many(jobs, self.about.model, parent=self._parent, bound=self._bound)

    def _follow(self, subscriptions: list[Subscription]) -> list[Follower]:
        """Nothing is read: the subscriptions are older than the jobs."""
        store = self._services.store
        return [
            Follower(store, subscription, self._record(job), START, behind=False)
            for job, subscription in zip(self._jobs, subscriptions, strict=True)
        ]

    def _record(self, job: JobRequest) -> JobRecord:
        return JobRecord.queued(
            str(job.id), self.about.model, job.priority, job.metadata, parent=self._parent, bound=self._bound
        )

    def _ended(self, number: int, event: Event) -> SlotlineError | None:
        """Take down how a job ended; if it has failed, the error."""
        self._unended.discard(str(self._jobs[number].id))
        final: dict[str, Any] = event.json()
        error = failure_of(final)
        if error is None:
            self.finals[number] = final
        return error


def _named(call_id: str, jobs: list[JobRequest]) -> list[JobRequest]:
    """The jobs with ids: that of the call, and a number behind it where there are several."""
    if len(jobs) == 1:
        return [jobs[0].model_copy(update={"id": call_id})]
    return [job.model_copy(update={"id": f"{call_id}-{number}"}) for number, job in enumerate(jobs)]
