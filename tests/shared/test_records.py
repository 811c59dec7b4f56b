from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from rq import Queue
from rq.job import Job, JobStatus, Retry
from rq.rate_limit import RateLimit
from rq.registry import ReadyJobRegistry

from shared.errors import InvalidRequest
from shared.jobs import request_of
from shared.names import JOB_FUNCTION, SERIALIZER
from shared.records import STATUS, JobRecord, job_object
from shared.results import JobObject
from tests.shared.world import MODEL, NORMAL, World

REQUEST = {"prompt": "hi"}


def enqueue(world: World, **options: Any) -> Job:
    return world.queue.enqueue(JOB_FUNCTION, REQUEST, meta={"user": "é"}, retry=Retry(max=2), **options)


def created(world: World) -> Job:
    job = Job.create(JOB_FUNCTION, args=[REQUEST], connection=world.client, origin=NORMAL, serializer=SERIALIZER)
    job.save()
    return job


def deferred(world: World) -> Job:
    return enqueue(world, depends_on=enqueue(world))


def ready(world: World) -> Job:
    job = deferred(world)
    registry = ReadyJobRegistry(NORMAL, connection=world.client, serializer=SERIALIZER)
    with world.client.pipeline() as pipe:
        registry.register_jobs([job], pipeline=pipe)
        pipe.execute()
    return job


def rate_limited(world: World) -> Job:
    enqueue(world, rate_limit=RateLimit("k", 1))
    return enqueue(world, rate_limit=RateLimit("k", 1))


def scheduled(world: World) -> Job:
    return world.queue.enqueue_at(datetime.fromisoformat("2030-01-01T00:00:00Z"), JOB_FUNCTION, REQUEST)


def started(world: World) -> Job:
    job = enqueue(world)
    with world.client.pipeline() as pipe:
        job.prepare_for_execution("some-worker", pipeline=pipe)
        pipe.execute()
    return job


def finished(world: World) -> Job:
    job = started(world)
    job.ended_at = job.started_at
    job._result = {"text": "x"}
    with world.client.pipeline() as pipe:
        job._handle_success(100, pipeline=pipe)
        job.cleanup(100, pipeline=pipe)
        pipe.execute()
    return job


def failed(world: World, status: JobStatus = JobStatus.FAILED) -> Job:
    job = started(world)
    job.ended_at = job.started_at
    with world.client.pipeline() as pipe:
        job.set_status(status, pipeline=pipe)
        job._handle_failure("Traceback", pipeline=pipe)
        pipe.execute()
    return job


def canceled(world: World) -> Job:
    job = enqueue(world)
    job.cancel()
    return job


MAKERS: dict[str, Callable[[World], Job]] = {
    "created": created,
    "queued": enqueue,
    "scheduled": scheduled,
    "deferred": deferred,
    "ready_to_enqueue": ready,
    "rate_limited": rate_limited,
    "started": started,
    "finished": finished,
    "failed": failed,
    "stopped": lambda world: failed(world, JobStatus.STOPPED),
    "canceled": canceled,
}


def test_every_status_of_rq_has_a_status_of_ours_and_a_case_here() -> None:
    assert set(STATUS) == set(MAKERS) == {status.value for status in JobStatus}


def seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


@pytest.mark.parametrize("status", MAKERS)
def test_a_record_reads_what_rq_wrote(status: str, world: World) -> None:
    job_id = MAKERS[status](world).id
    job = world.job(job_id)
    record = world.store.fetch(job_id)
    assert record.rq_status == record.detail == job.get_status().value == status
    assert (record.id, record.origin, record.model, record.priority) == (job.id, NORMAL, MODEL, "normal")
    assert record.created_at == seconds(job.created_at)
    assert record.enqueued_at == seconds(job.enqueued_at)
    assert record.started_at == seconds(job.started_at)
    assert record.ended_at == seconds(job.ended_at)
    assert record.result_ttl_s == job.result_ttl
    assert record.failure_ttl_s == job.failure_ttl
    assert record.retries_left == (job.retries_left or 0)
    assert record.worker == (job.worker_name or "")
    assert record.metadata == job.meta
    assert record.arguments() == (JOB_FUNCTION, [REQUEST], {})
    assert request_of(record) == REQUEST
    assert (record.execution, record.fingerprint, record.end, record.attempts) == (None, None, None, 0)
    assert not record.cancelling


@pytest.mark.parametrize("status", MAKERS)
def test_the_job_object_of_any_rq_status_is_the_documented_one(status: str, world: World) -> None:
    job_id = MAKERS[status](world).id
    shown = world.store.view(job_id)
    assert list(shown) == list(JobObject.model_fields)
    checked = JobObject.model_validate_json(json.dumps(shown))
    assert checked.status == STATUS[status]
    assert checked.detail == status
    over = status in ("finished", "failed", "stopped", "canceled")
    assert world.store.fetch(job_id).is_over is over
    assert (checked.ended_at is not None) is over
    # RQ keeps a cancelled job for ever.
    assert (checked.expires_at is not None) is (over and status != "canceled")
    assert checked.finish_reason == ("cancelled" if checked.status == "cancelled" else None)
    assert (checked.position is not None) is (status == "queued")


def test_an_expiry_is_the_end_and_what_is_left_of_it(world: World) -> None:
    job_id = finished(world).id
    shown = world.store.view(job_id)
    assert shown["expires_at"] - shown["ended_at"] == pytest.approx(100, abs=2)


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_the_final_job_object_validates_with_everything_in_it(status: Any, world: World) -> None:
    record = world.take(metadata={"a": [1]}, priority="batch").record
    error = {"message": "m", "type": "t", "code": "c", "param": None}
    final = job_object(
        record,
        status=status,
        ended_at=1000.0,
        ttl_s=60,
        text="a\ud800",
        finish_reason="length",
        usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "cached_tokens": 0},
        timings=dict.fromkeys(
            ["queue_ms", "prompt_ms", "generation_ms", "ttft_ms", "duration_ms"]
            + ["prompt_tokens_per_s", "generation_tokens_per_s"],
            1.5,
        ),
        seed=2**63 - 1,
        error=error,
        reasoning_content="r",
        tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        logprobs=[{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}],
        embedding="AACAPw==",
    )
    JobObject.model_validate({**final, "text": "a"})
    assert (final["status"], final["ended_at"], final["expires_at"]) == (status, 1000.0, 1060.0)
    # What RQ will write a moment later, not what it says now.
    assert final["detail"] == {"completed": "finished", "failed": "failed", "cancelled": "canceled"}[status]
    assert final["metadata"] == {"a": [1]}
    assert final["priority"] == "batch"
    assert (final["reasoning_content"], final["embedding"], final["logprobs"][0]["bytes"]) == ("r", "AACAPw==", [97])
    assert final["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert json.loads(json.dumps(final)) == final


def test_a_job_object_of_a_job_that_goes_on_has_no_end(world: World) -> None:
    shown = job_object(world.take().record, ended_at=1000.0, ttl_s=60)
    assert (shown["status"], shown["ended_at"], shown["expires_at"]) == ("running", None, None)


# --- our own fields ---


def parse(**fields: str) -> JobRecord:
    return JobRecord.parse("j", {k.encode(): v.encode() for k, v in {"origin": NORMAL, **fields}.items()})


@pytest.mark.parametrize(
    ("fields", "status", "detail", "is_over"),
    [
        ({"status": "started"}, "running", "started", False),
        ({"status": "started", "sl_cancel": "1"}, "cancelled", "cancelling", False),
        ({"status": "started", "sl_end": "completed"}, "completed", "started", True),
        ({"status": "started", "sl_end": "failed"}, "failed", "started", True),
        ({"status": "started", "sl_end": "cancelled", "sl_cancel": "1"}, "cancelled", "started", True),
        # Handed back by its worker after the cancel was promised.
        ({"status": "queued", "sl_cancel": "1"}, "cancelled", "cancelling", False),
        # Put back by RQ's own requeue after its end.
        ({"status": "queued", "sl_end": "failed"}, "queued", "queued", False),
        ({"status": "queued", "sl_end": "cancelled", "sl_cancel": "1"}, "queued", "queued", False),
        ({"status": "finished", "sl_end": "completed"}, "completed", "finished", True),
        ({"status": "from_the_future"}, "queued", "from_the_future", False),
        ({}, "queued", "", False),
    ],
)
def test_status_and_detail_follow_our_flags(fields: dict[str, str], status: str, detail: str, is_over: bool) -> None:
    record = parse(**fields)
    assert (record.status, record.detail, record.is_over) == (status, detail, is_over)


def test_the_call_a_job_belongs_to_shows_and_who_it_is_bound_to_does_not() -> None:
    record = parse(status="queued", sl_parent="call-1", sl_bound="web-1")
    assert (record.parent, record.bound) == ("call-1", "web-1")
    shown = job_object(record)
    assert shown["parent"] == "call-1"
    assert "bound" not in shown
    assert job_object(parse(status="queued"))["parent"] is None


@pytest.mark.parametrize("meta", ["", "x", "[1]", "5", "null", "\x80\x04K\x01."])
def test_meta_that_is_no_json_object_shows_as_none(meta: str) -> None:
    assert parse(meta=meta).metadata == {}


def test_times_of_older_rq_versions_are_read() -> None:
    assert parse(created_at="1970-01-01T00:00:05Z").created_at == 5.0
    assert parse(created_at="1970-01-01T00:00:05.250000Z").created_at == 5.25


@pytest.mark.parametrize("call", ["plain", "kwargs", "named"])
def test_the_request_may_be_given_in_three_ways(call: str, world: World) -> None:
    if call == "plain":
        job = world.queue.enqueue(JOB_FUNCTION, REQUEST)
    elif call == "named":
        job = world.queue.enqueue(JOB_FUNCTION, request=REQUEST)
    else:
        job = world.queue.enqueue(JOB_FUNCTION, **REQUEST)
    assert request_of(world.store.fetch(job.id)) == REQUEST


@pytest.mark.parametrize(
    ("function", "args"),
    [(JOB_FUNCTION, []), (JOB_FUNCTION, ["x"]), (JOB_FUNCTION, [REQUEST, REQUEST]), ("os.system", [REQUEST])],
)
def test_a_call_of_something_else_is_refused(function: str, args: list[Any], world: World) -> None:
    job = world.queue.enqueue(function, *args)
    if function == JOB_FUNCTION and not args:
        assert request_of(world.store.fetch(job.id)) == {}  # refused as a request without a prompt
        return
    with pytest.raises(InvalidRequest, match="slotline.generate"):
        request_of(world.store.fetch(job.id))


def test_a_pickled_job_is_refused_and_never_loaded(world: World) -> None:
    job = Queue(NORMAL, connection=world.client).enqueue(JOB_FUNCTION, REQUEST)
    record = world.store.fetch(job.id)
    with pytest.raises(InvalidRequest, match="JSON"):
        request_of(record)
    assert record.status == "queued"


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"5", b"null", b"[]", b'{"a":1}', b'["f",null,5,{}]', b'["f",null,[],5]']
)
def test_a_broken_payload_is_refused(data: bytes) -> None:
    record = JobRecord.parse("j", {b"origin": b"m", b"data": data})
    with pytest.raises(InvalidRequest, match="JSON"):
        request_of(record)


def test_a_payload_that_is_not_compressed_is_read() -> None:
    data = SERIALIZER.dumps([JOB_FUNCTION, None, [REQUEST], {}])
    assert request_of(JobRecord.parse("j", {b"origin": b"m", b"data": data})) == REQUEST
