"""The script that records completed jobs, beside RQ's own handler of success."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from rq import Queue
from rq.job import Job
from rq.registry import FinishedJobRegistry
from rq.results import Result
from rq.worker import SimpleWorker

from shared.jobs import JobStore
from shared.names import SERIALIZER, events_key, held_key, job_key, queue_name
from shared.records import SlotTime
from shared.schemas import JobRequest
from shared.settings import Settings
from shared.stream import dumps
from tests.processes import eventually
from worker import finaliser
from worker.finaliser import Finaliser, Outcome
from worker.held import HeldJob, hold

QUEUE = queue_name("m", "normal")
FINAL = {"status": "completed", "text": "é"}


class Recorder:
    """A finaliser, and the worker whose jobs it records."""

    def __init__(self, store: JobStore, settings: Settings, name: str = "w") -> None:
        self.store = store
        self.settings = settings
        self.worker = SimpleWorker([QUEUE], name=name, connection=store.client, serializer=SERIALIZER)
        self.done: list[str] = []
        self.finaliser = Finaliser(self.worker, store, self.done.append)
        self.finaliser.start()

    def take(self, ttl_s: int = 60, **fields: Any) -> HeldJob:
        """Submit a job and pull it, as a worker would."""
        job_id = self.store.submit(JobRequest(prompt="x", **fields), "m").job_id
        self.store.client.hset(job_key(job_id), "result_ttl", ttl_s)
        return self.pull()

    def pull(self) -> HeldJob:
        (held,) = hold(self.store.pull(self.worker.name, [QUEUE], 1), self.store.client, "w", self.settings)
        return held

    def complete(self, *jobs: HeldJob) -> None:
        """Record jobs that have completed, together, and wait until that is done."""
        before = len(self.done)
        self.finaliser.put(*(Outcome("completed", held, FINAL, dumps(FINAL)) for held in jobs))
        eventually(lambda: len(self.done) == before + len(jobs), "the jobs are recorded")


@pytest.fixture
def recorder(store: JobStore, settings: Settings) -> Iterator[Recorder]:
    made = Recorder(store, settings)
    yield made
    made.finaliser.stop()


def everything(client: Any, job_id: str) -> dict[str, Any]:
    """What Redis has of a job and of worker `w`, without moments, by key without the job's id."""
    found: dict[str, Any] = {}
    for key in sorted(k.decode() for k in client.keys("*") if b"slotline" not in k):
        if key.startswith("rq:job:") and job_id not in key:
            continue
        name, kind = key.replace(job_id, "ID"), client.type(key)
        expires = client.ttl(key) > 0
        if kind == b"hash":
            moments = {
                b"created_at",
                b"enqueued_at",
                b"started_at",
                b"ended_at",
                b"last_heartbeat",
                b"sl_exec",
                b"sl_ticket",
            }
            fields = client.hgetall(key)
            found[name] = (expires, {k: v for k, v in fields.items() if k not in moments}, sorted(fields))
        elif kind == b"stream":
            ((_, fields),) = client.xrange(key)
            said = {k: v for k, v in fields.items() if not k.startswith(b"execution_")}
            said[b"return_value"] = json.loads(b64decode(said[b"return_value"]))  # however it is spaced
            found[name] = (expires, said, sorted(fields))
        elif kind == b"zset":
            found[name] = (expires, [member.replace(job_id.encode(), b"ID") for member in client.zrange(key, 0, -1)])
        else:
            found[name] = (expires, kind)
    return found


@pytest.mark.parametrize("ttl_s", [60, -1], ids=["for a minute", "for ever"])
def test_the_script_writes_what_rqs_own_handler_writes(
    recorder: Recorder, client: redis.Redis, ttl_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for by_rq in (False, True):
        client.flushall()
        monkeypatch.setattr(finaliser, "_is_plain", lambda _, plain=not by_rq: plain)
        held = recorder.take(ttl_s, metadata={"a": 1})
        recorder.complete(held)
        found = everything(client, held.id)
        worked = found["rq:worker:w"][1].pop(b"total_working_time")
        assert float(worked) >= 0
        states.append(found)
    assert states[0] == states[1]


def test_a_result_is_read_back_by_rq(recorder: Recorder, client: redis.Redis) -> None:
    held = recorder.take()
    recorder.complete(held)
    job = Job.fetch(held.id, connection=client, serializer=SERIALIZER)
    assert (job.get_status(), job.return_value()) == ("finished", FINAL)
    result = Result.fetch_latest(job, serializer=SERIALIZER)
    assert result is not None
    assert (result.worker_name, result.execution_id) == ("w", held.execution.id)
    assert job.ended_at is not None and job.started_at is not None and job.ended_at >= job.started_at
    assert FinishedJobRegistry(QUEUE, client).get_expiration_time(job) > job.ended_at


def test_a_job_with_dependents_is_left_to_rq_and_the_others_are_not(recorder: Recorder, client: redis.Redis) -> None:
    first, second = recorder.take(), recorder.take()
    dependent = recorder.store.submit(JobRequest(prompt="later", depends_on=first.id), "m").job_id
    recorder.complete(first, second)
    assert recorder.store.fetch(dependent).rq_status == "queued"
    assert {recorder.store.fetch(held.id).rq_status for held in (first, second)} == {"finished"}
    assert client.hget(recorder.worker.key, "successful_job_count") == b"2"


def test_recording_again_after_a_lost_reply_changes_nothing(recorder: Recorder, client: redis.Redis) -> None:
    held = recorder.take()
    recorder.complete(held)
    recorder.complete(held)
    assert client.xlen(f"rq:results:{held.id}") == 1
    assert client.hget(recorder.worker.key, "successful_job_count") == b"1"
    assert client.llen(held_key("w")) == 0


def test_a_job_that_was_queued_again_meanwhile_is_not_recorded(recorder: Recorder, client: redis.Redis) -> None:
    held = recorder.take()
    client.hset(job_key(held.id), "status", "queued")
    client.hdel(job_key(held.id), "sl_exec")
    Queue(QUEUE, connection=client, serializer=SERIALIZER).push_job_id(held.id)
    again = recorder.pull()
    assert again.id == held.id
    recorder.complete(held)
    assert recorder.store.fetch(held.id).rq_status == "started"
    assert client.lrange(held_key("w"), 0, -1) == [held.id.encode()]
    recorder.complete(again)
    assert recorder.store.fetch(held.id).rq_status == "finished"
    assert client.llen(held_key("w")) == 0


@pytest.mark.parametrize("kind", ["failed", "cancelled", "stopped", "retry", "handed_back"])
def test_a_job_that_is_taken_over_between_look_and_write_is_left_to_its_next_owner(
    kind: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = recorder.take(retries=2)
    look, taken_over = Finaliser._is_due, []

    def look_and_be_late(self: Finaliser, outcome: Outcome, watching: Any) -> bool:
        is_due = look(self, outcome, watching)
        if not taken_over:
            recorder.store.bury("w")
            taken_over.extend(recorder.store.pull("other", [QUEUE], 1))
        return is_due

    monkeypatch.setattr(Finaliser, "_is_due", look_and_be_late)
    if kind == "handed_back":  # one script, which looks by itself
        recorder.store.bury("w")
        taken_over.extend(recorder.store.pull("other", [QUEUE], 1))
    error = {"message": "it broke", "code": "internal_error"}
    recorder.finaliser.put(Outcome(kind, held, {"status": kind, "error": error}))
    eventually(lambda: recorder.done, "it is let go of")
    record = recorder.store.fetch(held.id)
    assert (record.rq_status, record.worker, record.retries_left) == ("started", "other", 2)
    assert record.execution == taken_over[0].execution
    assert not recorder.store.client.llen(f"rq:queue:{QUEUE}") and not recorder.store.client.llen(held_key("w"))


def put(recorder: Recorder, outcome: Outcome) -> None:
    before = len(recorder.done)
    recorder.finaliser.put(outcome)
    eventually(lambda: len(recorder.done) == before + 1, "it is recorded")


@pytest.mark.parametrize("kind", ["retry", "handed_back"])
def test_a_job_that_goes_on_elsewhere_takes_its_time_in_slots_with_it(recorder: Recorder, kind: Any) -> None:
    held = recorder.take(retries=1)
    put(recorder, Outcome(kind, held, slot_time=SlotTime(3.5, 0.5)))
    again = recorder.pull()
    assert (again.id, again.record.slot_time) == (held.id, SlotTime(3.5, 0.5))


@pytest.mark.parametrize("interval", [0, 1000])
@pytest.mark.parametrize("kind", ["retry", "handed_back"])
def test_a_cancel_that_was_promised_meanwhile_ends_it_at_once(
    recorder: Recorder, client: redis.Redis, kind: Any, interval: int
) -> None:
    held = recorder.take(retries=1)
    held.raw[b"retry_intervals"] = f"[{interval}]".encode()
    assert recorder.store.cancel(held.id)["detail"] == "cancelling"
    put(recorder, Outcome(kind, held, slot_time=SlotTime(1.0)))
    shown = recorder.store.view(held.id)
    assert (shown["status"], shown["detail"]) == ("cancelled", "canceled")
    assert recorder.store.stream.last(held.id).json()["status"] == "cancelled"  # type: ignore[union-attr]
    assert not client.zcard(f"rq:scheduled:{QUEUE}") and not client.llen(f"rq:queue:{QUEUE}")


def test_the_log_of_a_job_that_is_gone_is_not_kept_for_ever(recorder: Recorder, client: redis.Redis) -> None:
    held = recorder.take()
    client.xadd(events_key(held.id), {"event": "started", "data": "{}"}, id="0-*")
    Job.fetch(held.id, connection=client, serializer=SERIALIZER).delete()
    put(recorder, Outcome("gone", held))
    assert 0 < client.ttl(events_key(held.id)) <= 60
