"""The state of batches in Redis: what the API asks for, what their runner writes, and who the runner is.

Every change is one script (`shared/lua/batch_*.lua`). The runner of a batch holds its lease and a *fence*, a number
that grows with each new holder: what is written with an older one is refused, so that a runner that was only slow can
do no harm.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed
        │  └──────────┴──────────────┴──▶ cancelling ─▶ cancelled
        ├──▶ failed                                                  what is wrong with the input is in `errors`
        └─────────────┴──────────────┴──▶ expired

An ended batch with failed lines goes back to `in_progress` by `retry_failed`. Counts only grow, except that a retry
takes the failed lines out again; `completed + failed` is always the number of rows in the two result files.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, cast

import redis

from shared.batches.reading import BatchReader
from shared.batches.records import BatchRecord, Usage
from shared.batches.schemas import ENDED, BatchStatus, window_seconds
from shared.connection import wait_for_replicas
from shared.errors import BatchNotFound, BatchState, FileNotFound, IdConflict, InvalidRequest, RedisUnavailable
from shared.files import new_file_id
from shared.lua import script
from shared.names import (
    BATCHES,
    FILE_EXPIRY,
    FILES,
    OPEN_BATCHES,
    TRASH,
    batch_done_key,
    batch_failed_key,
    batch_key,
    batch_lease_key,
    file_key,
    file_users_key,
)
from shared.openai.exchange import Endpoint
from shared.paging import pages
from shared.settings import Settings
from shared.stream import dumps
from shared.webhooks.state import URL_FIELD

EndStatus = Literal["completed", "expired", "cancelled"]


class LeaseLost(Exception):
    """Somebody else runs the batch now, or it is gone: stop, and write nothing more."""


@dataclass(frozen=True, slots=True)
class Part:
    """An object in the storage with rows of results; it is written before it is committed and never changes.

    `numbers` are the lines it has rows of, numbered from 1 as they stand in the input file. Those of an `error` part
    count as failed.
    """

    which: Literal["output", "error"]
    name: str
    numbers: Sequence[int]
    bytes: int

    def entry(self) -> str:
        """What the list of a file's parts holds of it."""
        return dumps({"name": self.name, "lines": len(self.numbers), "bytes": self.bytes})


class BatchStore(BatchReader):
    """All operations on batches. Safe to share between threads.

    Every method raises redis-py's own errors when Redis cannot be reached. `clock` gives the seconds since 1970.
    """

    def __init__(self, client: redis.Redis, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        super().__init__(client)
        self.settings = settings
        self.clock = clock
        self._create = script(client, "batch_create")
        self._acquire = script(client, "batch_acquire")
        self._renew = script(client, "batch_renew")
        self._move = script(client, "batch_move")
        self._commit = script(client, "batch_commit")
        self._finish = script(client, "batch_finish")
        self._retry = script(client, "batch_retry")

    # --- the API ---

    def create(
        self,
        input_file_id: str,
        endpoint: Endpoint,
        completion_window: str,
        metadata: dict[str, str] | None = None,
        output_ttl_s: int | None = None,
        idempotency: str | None = None,
        webhook_url: str | None = None,
    ) -> BatchRecord:
        """A new batch, `validating`. Its input file cannot be deleted until it has ended.

        Args:
            input_file_id: a file with the purpose `batch`.
            endpoint: where each line would be sent.
            completion_window: such as `24h` or `7d`.
            metadata: kept and shown with the batch.
            output_ttl_s: how long the results are kept after their first row; left out, as long as the batch.
            idempotency: the caller's `Idempotency-Key`; as long as its batch is kept, it means that one.
            webhook_url: where to send a webhook when the batch has ended.

        Raises:
            FileNotFound: there is no such file.
            IdConflict: the key belongs to a batch that was asked for otherwise.
            InvalidRequest: the file has another purpose.
            RedisUnavailable: it is stored, but fewer than `redis_wait_replicas` replicas have it.
        """
        now = self.clock()
        name = uuid.uuid4().hex if idempotency is None else sha256(idempotency.encode()).hexdigest()[:32]
        batch_id = f"batch_{name}"
        asked = [input_file_id, endpoint, completion_window, metadata, output_ttl_s, webhook_url]
        fields: dict[str, Any] = {
            "input_file_id": input_file_id,
            "endpoint": endpoint,
            "completion_window": completion_window,
            "created_at": int(now),
            "expires_at": int(now) + window_seconds(completion_window),
        }
        if metadata is not None:
            fields["metadata"] = dumps(metadata)
        if output_ttl_s is not None:
            fields["output_ttl_s"] = output_ttl_s
        if webhook_url is not None:
            fields[URL_FIELD] = webhook_url
        outcome = self._create(
            keys=[batch_key(batch_id), BATCHES, OPEN_BATCHES, file_key(input_file_id), file_users_key(input_file_id)],
            args=[batch_id, int(now * 1000), int(now), dumps(asked), *(x for pair in fields.items() for x in pair)],
        ).decode()
        if outcome == "conflict":
            raise IdConflict(f"the key belongs to batch {batch_id!r}, which was asked for otherwise", "Idempotency-Key")
        if outcome == "no_file":
            raise FileNotFound(input_file_id, "input_file_id")
        if outcome == "wrong_purpose":
            raise InvalidRequest("`input_file_id` must be a file uploaded with the purpose `batch`", "input_file_id")
        self._wait_for_replicas(batch_id)
        return self.get(batch_id)

    def _wait_for_replicas(self, batch_id: str) -> None:
        wanted = self.settings.redis_wait_replicas
        if not wanted:
            return
        pipe = self.client.pipeline(transaction=False)
        wait_for_replicas(pipe, self.settings)
        _, replicas = pipe.execute()
        if replicas < wanted:
            raise RedisUnavailable(
                f"only {replicas} of {wanted} replicas of Redis have it in time; batch {batch_id} is stored and may "
                "run: ask for it, or send it again with the same Idempotency-Key"
            )

    def cancel(self, batch_id: str) -> BatchRecord:
        """Ask for an end: the batch is `cancelling`, and `cancelled` once its runner is through. Resumes a paused one.

        On a batch that is cancelling or cancelled this changes nothing.

        Raises:
            BatchNotFound: there is none.
            BatchState: it has ended otherwise.
        """
        fields = {"status": "cancelling", "cancelling_at": int(self.clock())}
        status = self._change(batch_id, ("validating", "in_progress", "finalizing"), fields, remove="paused")
        if status in ("completed", "failed", "expired"):
            raise BatchState(f"batch {batch_id!r} has already ended: it is {status}", "batch_id")
        return self.get(batch_id)

    def pause(self, batch_id: str) -> BatchRecord:
        """Start no more of its lines until it is resumed; a second time changes nothing. Its window runs on.

        Raises:
            BatchNotFound: there is none.
            BatchState: it is neither `validating` nor `in_progress`.
        """
        return self._set_paused(batch_id, {"paused": 1})

    def resume(self, batch_id: str) -> BatchRecord:
        """Undo a pause; on a batch that is not paused this changes nothing.

        Raises:
            BatchNotFound: there is none.
            BatchState: it is neither `validating` nor `in_progress`.
        """
        return self._set_paused(batch_id, {}, remove="paused")

    def _set_paused(self, batch_id: str, fields: dict[str, Any], remove: str = "") -> BatchRecord:
        allowed = ("validating", "in_progress")
        status = self._change(batch_id, allowed, fields, remove=remove)
        if status not in allowed:
            raise BatchState(f"batch {batch_id!r} is {status}: there is nothing to pause or resume", "batch_id")
        return self.get(batch_id)

    def retry_failed(self, batch_id: str) -> BatchRecord:
        """Run the failed lines of an ended batch again: it is `in_progress` with a new window, its error file gone.

        Raises:
            BatchNotFound: there is none.
            BatchState: it has not ended, or has no failed line.
            FileNotFound: its input file is gone.
        """
        batch = self.get(batch_id)
        now = int(self.clock())
        outcome = self._retry(
            keys=[
                batch_key(batch_id),
                batch_done_key(batch_id),
                batch_failed_key(batch_id),
                OPEN_BATCHES,
                FILES,
                FILE_EXPIRY,
                TRASH,
                file_key(batch.input_file_id),
                file_users_key(batch.input_file_id),
            ],
            args=[batch_id, now, now + window_seconds(batch.completion_window), _listed(ENDED)],
        ).decode()
        match outcome:
            case "ok":
                return self.get(batch_id)
            case "missing":
                raise BatchNotFound(batch_id)
            case "no_file":
                raise FileNotFound(batch.input_file_id)
            case "no_failed":
                raise BatchState(f"batch {batch_id!r} has no failed line to run again", "batch_id")
            case status:
                raise BatchState(f"batch {batch_id!r} has not ended: it is {status}", "batch_id")

    # --- the runner ---

    def acquire(self, batch_id: str, owner: str, lease_s: float) -> int | None:
        """Become the runner of an open batch that has none; the fence, or None where somebody else is or it has ended.

        `owner` is only a name to show; the fence alone tells holders apart.
        """
        fence = self._acquire(
            keys=[batch_key(batch_id), batch_lease_key(batch_id), OPEN_BATCHES],
            args=[batch_id, owner, _ms(lease_s)],
        )
        return int(fence) or None

    def renew(self, batch_id: str, fence: int, lease_s: float) -> bool:
        """Stay the runner. A lease that ran out can still be renewed if nobody took the batch meanwhile."""
        return self._hold(batch_id, fence, _ms(lease_s))

    def release(self, batch_id: str, fence: int) -> None:
        """Let another become the runner at once. Without effect where one has."""
        self._hold(batch_id, fence, 0)

    def _hold(self, batch_id: str, fence: int, lease_ms: int) -> bool:
        keys = [batch_key(batch_id), batch_lease_key(batch_id)]
        return bool(self._renew(keys=keys, args=[fence, lease_ms]))

    def start(self, batch_id: str, fence: int, total: int, model: str) -> BatchStatus:
        """The input is in order: `validating` becomes `in_progress`. The state it is in then, such as `cancelling`.

        Raises:
            LeaseLost: the fence has moved on.
        """
        known = {"total": total, "model": model}
        begun = {"status": "in_progress", "in_progress_at": int(self.clock())}
        status = self._change(batch_id, ("validating",), known | begun, fence)
        if status == "validating":
            return "in_progress"
        # Asked to cancel while its lines were checked: each of them has a row all the same.
        return self._change(batch_id, ("cancelling",), known, fence)

    def fail_validation(self, batch_id: str, fence: int, errors: Sequence[dict[str, Any]]) -> BatchStatus:
        """End a batch whose input cannot be run: `failed`, or `cancelled` where that was asked for.

        Args:
            batch_id: a batch that was not started.
            fence: of the caller's lease.
            errors: each with `code`, `line`, `message` and `param`.

        Raises:
            LeaseLost: the fence has moved on.
            ValueError: the batch was started (a defect of the caller).
        """
        return self._end(batch_id, fence, "failed", ("validating", "cancelling"), dumps(list(errors)))

    def commit_part(self, batch_id: str, fence: int, parts: Sequence[Part], usage: Usage) -> BatchStatus:
        """Make parts of the results known, all or none, and count their lines; returns the batch's state.

        The parts' objects are in the storage already (`FileStore.put`). The first part of a kind makes the output or
        error file. The same parts a second time (the first answer was lost) change nothing.

        Raises:
            LeaseLost: the fence has moved on.
            ValueError: a line has a row already, or there are more lines than `total` (a defect of the caller).
        """
        if not parts:
            return self.get(batch_id).status
        tokens = [usage.input, usage.output, usage.cached, usage.reasoning]
        now = self.clock()
        outcome = self._commit(
            keys=[batch_key(batch_id), batch_done_key(batch_id), batch_failed_key(batch_id), FILES, FILE_EXPIRY, TRASH],
            args=[
                fence,
                int(now),
                int(now * 1000),
                batch_id,
                new_file_id(),
                new_file_id(),
                dumps([list(part.numbers) for part in parts]),
                *tokens,
                *(x for part in parts for x in (part.which, part.name, part.bytes, part.entry())),
            ],
        ).decode()
        if outcome in ("doubled", "beyond"):
            raise ValueError(f"a part of batch {batch_id!r} was refused: {outcome}")
        return _kept(outcome)

    def finalize(self, batch_id: str, fence: int) -> BatchStatus:
        """All lines are through: `in_progress` becomes `finalizing`. The state it is in then, such as `cancelling`.

        Raises:
            LeaseLost: the fence has moved on.
        """
        fields = {"status": "finalizing", "finalizing_at": int(self.clock())}
        status = self._change(batch_id, ("in_progress",), fields, fence, remove="paused")
        return "finalizing" if status == "in_progress" else status

    def finish(self, batch_id: str, fence: int, status: EndStatus) -> BatchStatus:
        """End a batch all of whose lines have a row, and give up the lease. It and its files expire from now on.

        A batch that is `cancelling` ends as `cancelled`, whatever `status` says. Returns the state it ended in.

        Raises:
            LeaseLost: the fence has moved on.
            ValueError: a line has no row yet (a defect of the caller).
        """
        return self._end(batch_id, fence, status, ("validating", "in_progress", "finalizing", "cancelling"))

    def sweep(self) -> int:
        """Drop expired batches from the list; how many there were."""
        count = 0
        for ids in pages(self.client, BATCHES, oldest_first=True):
            pipe = self.client.pipeline(transaction=False)
            for batch_id in ids:
                pipe.exists(batch_key(batch_id))
            gone = [batch_id for batch_id, there in zip(ids, pipe.execute(), strict=True) if not there]
            if gone:
                count += self.client.zrem(BATCHES, *gone)
                self.client.srem(OPEN_BATCHES, *gone)
        return count

    # --- the scripts that several of these share ---

    def _change(
        self,
        batch_id: str,
        allowed: Sequence[str],
        fields: dict[str, Any],
        fence: int | None = None,
        remove: str = "",
    ) -> BatchStatus:
        """Set fields of a batch that is in an allowed state; the state it was in."""
        pairs = [x for pair in fields.items() for x in pair]
        args = ["" if fence is None else fence, _listed(allowed), remove, *pairs]
        outcome = self._move(keys=[batch_key(batch_id)], args=args).decode()
        if outcome == "missing" and fence is None:
            raise BatchNotFound(batch_id)
        return _kept(outcome)

    def _end(
        self, batch_id: str, fence: int, status: BatchStatus, allowed: Sequence[str], errors: str = ""
    ) -> BatchStatus:
        """End a batch that is in an allowed state; the state it ended in."""
        outcome = self._finish(
            keys=[
                batch_key(batch_id),
                batch_done_key(batch_id),
                batch_failed_key(batch_id),
                batch_lease_key(batch_id),
                OPEN_BATCHES,
                FILE_EXPIRY,
            ],
            args=[batch_id, fence, status, _listed(allowed), int(self.clock()), self.settings.file_ttl_s, errors],
        ).decode()
        if outcome == "unfinished":
            raise ValueError(f"batch {batch_id!r} cannot end: some lines have no row")
        ended = _kept(outcome)
        if ended not in ENDED:
            raise ValueError(f"batch {batch_id!r} is {ended} and cannot end as {status}")
        return ended


def _kept(outcome: str) -> BatchStatus:
    """The state a script answers with, if the caller still runs the batch."""
    if outcome in ("lost", "missing"):
        raise LeaseLost(outcome)
    return cast(BatchStatus, outcome)


def _listed(states: Sequence[str]) -> str:
    return f",{','.join(states)},"


def _ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
