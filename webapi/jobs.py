"""Jobs: submit, look at, list, cancel, erase, retry."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Annotated

from flask import Response, jsonify, request
from pydantic import Field
from redis.exceptions import RedisError

from shared.errors import InvalidRequest, JobNotFound
from shared.records import JobRecord, job_object
from shared.results import ErrorResponse, JobList, JobObject
from shared.schemas import JobRequest, Strict
from webapi.admission import admit
from webapi.callers import caller_is_gone
from webapi.describe import Query, blueprint, body_of
from webapi.follow import wait_for_end
from webapi.idempotency import IdempotencyHeader
from webapi.listing import ListQuery, job_page
from webapi.paths import JobPath, possible_id
from webapi.services import services
from webapi.validation import read_body
from webapi.webhooks import check_webhook

bp = blueprint("jobs", "jobs")


class SubmitQuery(Query):
    """How to answer."""

    wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="Seconds to wait for the job's end before answering."
    )


class DeleteQuery(Query):
    """How thorough to be."""

    erase: bool = Field(False, description="Also remove the record, with prompt, text and log.")


class Deleted(Strict):
    """Answer to an erase."""

    id: str
    object: str
    deleted: bool


@bp.post(
    "/v1/jobs",
    summary="Submit a job",
    request_body=body_of(bp, JobRequest),
    responses={
        200: JobObject,
        202: JobObject,
        **dict.fromkeys((404, 409, 413, 415, 429), ErrorResponse),
    },
)
def submit(header: IdempotencyHeader, query: SubmitQuery) -> tuple[Response, int, dict[str, str]]:
    """Queue a generation. Without `wait`, and when it is not over in time, the answer is 202 with its current state.

    With `wait` a job that is over in time is answered with 200. A repeated id or `Idempotency-Key` with the same
    body is answered like the first time, with another body by 409. Nothing is queued when the answer is an error.
    """
    given = services()
    key = header.checked_key
    wait_s = _wait_s(query.wait)
    asked = read_body(JobRequest)
    check_webhook(given.settings, asked.webhook_url)
    model = admit(given, asked)
    submitted = given.store.submit(asked, model, key, given.settings.idempotency_ttl_s)
    job_id = submitted.job_id
    try:
        job = given.store.view(job_id)
    except RedisError:
        if not submitted.created:
            raise
        # It is queued, and that answer must not be lost.
        job = job_object(JobRecord.queued(job_id, model, asked.priority, asked.metadata))
    location = {"Location": job["links"]["self"]}
    if wait_s is None:
        return jsonify(job), 202, location
    ended = wait_for_end(given, job_id, wait_s, partial(caller_is_gone, request.environ))
    if ended is not None:
        return jsonify(ended), 200, location
    with contextlib.suppress(RedisError, JobNotFound):
        job = given.store.view(job_id)
    return jsonify(job), 202, location


@bp.get("/v1/jobs", summary="List jobs", responses={200: JobList})
def list_jobs(query: ListQuery) -> Response:
    """Jobs, newest first, without their text. A page may be shorter than `limit`; `has_more` tells."""
    return jsonify(job_page(services(), query))


@bp.get("/v1/jobs/<job_id>", summary="Look at a job", responses={200: JobObject, 404: ErrorResponse})
def look(path: JobPath) -> Response:
    """The job as it is now: its place while queued, the text so far while running, everything once ended."""
    return jsonify(services().store.view(possible_id(path)))


@bp.post(
    "/v1/jobs/<job_id>/cancel",
    summary="Cancel a job",
    responses={200: JobObject, 404: ErrorResponse, 409: ErrorResponse},
)
def cancel(path: JobPath) -> Response:
    """Cancel a job that has not ended. Cancelling it again changes nothing; a completed or failed one is 409."""
    return jsonify(services().store.cancel(possible_id(path)))


@bp.delete(
    "/v1/jobs/<job_id>",
    summary="Cancel or erase a job",
    responses={200: JobObject, 404: ErrorResponse, 409: ErrorResponse},
)
def delete(path: JobPath, query: DeleteQuery) -> Response:
    """Cancel a job, or with `erase` remove every trace of it, whatever its state."""
    job_id = possible_id(path)
    if not query.erase:
        return jsonify(services().store.cancel(job_id))
    services().store.erase(job_id)
    return jsonify(Deleted(id=job_id, object="job", deleted=True).model_dump())


@bp.post(
    "/v1/jobs/<job_id>/retry",
    summary="Retry a job",
    responses={202: JobObject, 404: ErrorResponse, 409: ErrorResponse},
)
def retry(path: JobPath) -> tuple[Response, int]:
    """Queue a failed or cancelled job again, to run from the start."""
    return jsonify(services().store.retry(possible_id(path))), 202


def _wait_s(asked: float | None) -> float | None:
    most = services().settings.max_wait_s
    if asked is not None and asked > most:
        raise InvalidRequest(f"`wait` is at most {most:g} seconds (SLOTLINE_MAX_WAIT_S)", "wait")
    return asked
