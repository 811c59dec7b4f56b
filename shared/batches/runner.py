"""Runs one batch, for as long as this process holds its lease.

What makes each line run once and have one row: results are committed before anything of their jobs is removed
(`shared/batches/parts.py`), and a line without a committed row goes out under the ids it had before, so that whoever
takes the batch up finds its jobs instead of making new ones.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from redis.exceptions import RedisError

from shared.batches.checking import InputCheck
from shared.batches.feeding import Feed
from shared.batches.flight import Flight
from shared.batches.lines import Line, LineError, Source
from shared.batches.parts import Results, put_manifest
from shared.batches.records import BatchRecord
from shared.batches.rows import not_run
from shared.batches.store import BatchStore, EndStatus, LeaseLost
from shared.errors import BatchNotFound, FileNotFound, QueueFull, Unavailable
from shared.files import FileStore
from shared.jobs import JobStore
from shared.names import DEFAULT_MODEL
from shared.registry import Registry
from shared.settings import BatchSettings

log = logging.getLogger("slotline.batches")

#: How often the batch's state and the number of live slots are read, and a full queue is tried again.
LOOK_S = 1.0
#: The longest wait for a job to end, and so for everything else to be noticed.
WAIT_S = 0.25
#: Passes come as seldom as this share of the window allows: many ends and submits in a pass cost less than one each.
SHARE_OF_WINDOW = 8
#: Jobs at a time for each live slot, and the least of all.
JOBS_PER_SLOT, MIN_WINDOW = 4, 16
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 5.0
#: How long an ended batch is waited with for workers to let go of its last jobs.
LET_GO_S = 5.0
#: Lines looked at together for jobs of a runner before us.
ADOPT_LINES = 64


class Interrupted(Exception):
    """The runner was told to stop in the middle of something long."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What runners work with. `jobs` has a client of its own, whose calls may block for a moment."""

    batches: BatchStore
    files: FileStore
    jobs: JobStore
    registry: Registry
    settings: BatchSettings


@dataclass(frozen=True, slots=True)
class Work:
    """A batch that is under way: lines to come, lines being run, rows to be written."""

    source: Source
    feed: Feed
    flight: Flight
    results: Results


@dataclass(slots=True)
class Lease:
    """The lease of a batch as far as this process knows. Who renews it moves `until`, on the monotonic clock.

    After `until` another may have taken the batch; then nothing is started until it is renewed or known to be lost.
    """

    batch_id: str
    fence: int
    until: float = math.inf
    is_lost: bool = False


class Runner:
    """One batch, on the thread that calls `run`.

    Args:
        tools: what to work with.
        lease: of the batch; somebody else renews it.
        clock: monotonic seconds.
    """

    def __init__(self, tools: Tools, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self._tools = tools
        self._lease = lease
        self._id = lease.batch_id
        self._fence = lease.fence
        self._clock = clock
        self._stop = threading.Event()
        self._work: Work | None = None
        self._is_read = False
        self._was_paused = False
        self._batch: BatchRecord | None = None
        self._next_look = 0.0
        self._window = MIN_WINDOW
        self._full_until = 0.0
        self._pause_s = 0.0

    def stop(self) -> None:
        """Make `run` write what there is and return. Any thread may call it."""
        self._stop.set()

    def run(self) -> None:
        """Work until the batch has ended or rests, somebody else runs it, or `stop`. Outages are waited out."""
        try:
            self._run_on()
            self._wind_up()
        except Interrupted:
            log.info("batch %s is left before its input was checked", self._id)
        except BatchNotFound:
            log.warning("batch %s is gone", self._id)
        except LeaseLost:
            log.warning("batch %s is run by another process now", self._id)
        except (RedisError, Unavailable) as error:
            log.warning("batch %s was left untidy: %s", self._id, error)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the input."""
        if self._work is not None:
            self._work.source.close()

    def _run_on(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stop.is_set():
            try:
                if self._lease.is_lost:
                    raise LeaseLost
                if not self._is_ours:
                    self._stop.wait(WAIT_S)
                elif self.step():
                    return
                backoff_s = FIRST_BACKOFF_S
            except (RedisError, Unavailable, OSError, FileNotFound, LineError) as error:
                log.warning("batch %s waits %g s: %s", self._id, backoff_s, error)
                self._batch = None  # what failed may have been done all the same
                self._stop.wait(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    @property
    def _is_ours(self) -> bool:
        return self._clock() < self._lease.until

    def step(self) -> bool:
        """One pass over what is to be done now; True when nothing is left to do.

        Raises:
            RedisError, StorageUnavailable, FileNotFound: nothing is lost, try again.
            LeaseLost: somebody else runs the batch now.
        """
        batch = self._look()
        if batch.is_ended:
            return True
        if batch.model is None:  # also where it is to be cancelled: each line will have a row
            self._validate(batch)
            return False
        work = self._take_up(batch)
        if self._is_late(batch):
            return self._cut(work, "batch_expired", "expired")
        if batch.status == "cancelling":
            return self._cut(work, "batch_cancelled", "cancelled")
        if self._is_paused(batch):
            return self._hold(work)
        return self._go_on(work)

    def _look(self) -> BatchRecord:
        """The batch's state and the window, as they were at most `LOOK_S` ago."""
        if self._batch is None or self._clock() >= self._next_look:
            batch = self._tools.batches.get(self._id)
            slots = sum(stats.n_parallel for stats in self._tools.registry.workers() if stats.model == batch.model)
            self._window = self._tools.settings.batch_window or max(MIN_WINDOW, JOBS_PER_SLOT * slots)
            self._next_look = self._clock() + LOOK_S
            self._batch = batch
        return self._batch

    # --- validating ---

    def _validate(self, batch: BatchRecord) -> None:
        log.info("batch %s: checking its input", self._id)
        check = InputCheck(batch.endpoint, self._tools.settings, self._resolve, self._check_stop)
        try:
            checked = check.run(self._opener(batch))
        except FileNotFound as error:
            errors, total, model = [LineError(error.code, error.message, "input_file_id").to_dict()], 0, None
        else:
            errors, total, model = checked.to_dicts(), checked.total, checked.model
        self._batch = None
        if errors:
            status = self._tools.batches.fail_validation(self._id, self._fence, errors)
            log.info("batch %s is %s: %d errors, the first: %s", self._id, status, len(errors), errors[0]["message"])
        else:
            status = self._tools.batches.start(self._id, self._fence, total, model or DEFAULT_MODEL)
            log.info("batch %s is %s: %d lines for %s", self._id, status, total, model)

    def _resolve(self, name: str | None) -> str:
        card = self._tools.registry.resolve(name)
        return card.name if card is not None else DEFAULT_MODEL

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted

    def _opener(self, batch: BatchRecord) -> Callable[[], BinaryIO]:
        return lambda: self._tools.files.open(batch.input_file_id)

    # --- running ---

    def _take_up(self, batch: BatchRecord) -> Work:
        """Begin where the results end."""
        if self._work is None:
            tools = self._tools
            done = tools.batches.done_lines(self._id)
            feed = Feed(tools.jobs, f"{self._id}-{batch.retries}", self._clock)
            flight = Flight(feed, batch)
            left_over = flight.left_over(done)
            results = Results(
                tools.batches, tools.files, tools.settings, feed, self._id, self._fence, left_over, self._clock
            )
            self._work = Work(Source(self._opener(batch), done), feed, flight, results)
            log.info("batch %s is taken up: %d of %d lines done", self._id, len(done), batch.total)
        return self._work

    def _go_on(self, work: Work) -> bool:
        may_wait = self._submit(work)
        if may_wait:
            self._stop.wait(self._pause_s)
        out = work.flight.out
        work.results.add(work.flight.collect(WAIT_S if may_wait else 0))
        self._pace(out - work.flight.out)
        self._write(work)
        if not (self._is_read and work.flight.is_empty):
            return False
        self._write(work, now=True)
        status = self._tools.batches.finalize(self._id, self._fence)
        return self._finish("cancelled" if status == "cancelling" else "completed")

    def _pace(self, came: int) -> None:
        """Pause longer where few jobs came back in a pass, shorter where many did."""
        change = self._window / SHARE_OF_WINDOW / max(came, 1)
        self._pause_s = min(WAIT_S, max(0.001, self._pause_s * min(2.0, max(0.5, change))))

    def _submit(self, work: Work) -> bool:
        """Submit jobs while there is room; True if only the end of one, or time, can make more."""
        try:
            while work.flight.out < self._window and not work.results.is_full:
                if self._stop.is_set() or not self._is_ours or self._clock() < self._full_until:
                    return True
                if not work.flight.submit_next() and not self._take_line(work):
                    return True
        except QueueFull:
            self._full_until = self._clock() + LOOK_S
        return not work.results.is_full

    def _take_line(self, work: Work) -> bool:
        line = self._next_line(work)
        if line is not None:
            work.results.add(work.flight.take(line))
        return line is not None

    def _next_line(self, work: Work) -> Line | None:
        line = None if self._is_read else work.source.next()
        self._is_read = line is None
        return line

    def _write(self, work: Work, now: bool = False) -> None:
        if work.results.write(now):
            self._batch = None  # the commit may have met another state
            self._put_manifest()
        work.results.discard()

    def _put_manifest(self) -> None:
        batch = self._tools.batches.get(self._id)
        left_s = 0.0 if batch.is_ended else max(0.0, batch.expires_at - self._tools.batches.clock())
        put_manifest(self._tools.files, batch, left_s + self._tools.settings.file_ttl_s)

    # --- pause ---

    def _is_paused(self, batch: BatchRecord) -> bool:
        if batch.paused != self._was_paused:
            log.info("batch %s is %s", self._id, "paused" if batch.paused else "resumed")
        self._was_paused = batch.paused
        return batch.paused

    def _hold(self, work: Work) -> bool:
        """Take back what waits and write what runs when it ends; then another batch may have our place."""
        work.flight.take_back()
        work.results.add(work.flight.collect(WAIT_S))
        self._write(work, now=not work.flight.out)
        return not work.flight.out and work.results.is_written and not work.results.has_leftovers

    # --- the end ---

    def _is_late(self, batch: BatchRecord) -> bool:
        return batch.status == "in_progress" and self._tools.batches.clock() >= batch.expires_at

    def _cut(self, work: Work, code: str, status: EndStatus) -> bool:
        """End now: a row for each line that has none."""
        self._find_submitted(work)
        work.results.add(work.flight.cut_off(code))
        while (line := self._next_line(work)) is not None:
            work.results.add([not_run(self._id, line, code)])
            self._write(work)
        self._write(work, now=True)
        return self._finish(status)

    def _find_submitted(self, work: Work) -> None:
        """Have in flight what a runner before us has submitted: lines go out in order, so it is the next ones."""
        found = True
        while found and not self._is_read:
            for _ in range(ADOPT_LINES):
                if not self._take_line(work):
                    break
            found = work.flight.adopt() > 0
            self._write(work)

    def _finish(self, status: EndStatus) -> bool:
        ended = self._tools.batches.finish(self._id, self._fence, status)
        self._batch = None
        log.info("batch %s is %s", self._id, ended)
        return True

    def _wind_up(self) -> None:
        """Write what there is and clear up; what fails here is found by whoever takes the batch up next."""
        if self._work is None:
            return
        if self._stop.is_set():
            self._work.results.add(self._work.flight.collect(0))
            self._write(self._work, now=True)
            return
        deadline = self._clock() + LET_GO_S
        while self._work.results.has_leftovers and self._clock() < deadline and not self._stop.wait(WAIT_S / 10):
            self._work.results.discard()
        batch = self._tools.batches.get(self._id)
        if batch.is_ended:
            self._put_manifest()
            self._work.feed.close()
