"""Batches: create, look at, list, cancel; and what OpenAI's do not have: pause, resume, run failed lines again."""

from __future__ import annotations

from typing import Any

from flask import Response, jsonify
from pydantic import Field

from shared.batches.schemas import BatchList, BatchObject, BatchRequest
from shared.errors import BatchNotFound, InvalidRequest
from shared.names import JOB_ID
from shared.results import ErrorResponse
from webapi.describe import Parameters, Query, blueprint, body_of
from webapi.files import page
from webapi.idempotency import IdempotencyHeader
from webapi.services import services
from webapi.validation import read_body
from webapi.webhooks import check_webhook

bp = blueprint("batches", "batches")

#: Answers of what changes a batch.
CHANGED: dict[Any, Any] = {200: BatchObject, 404: ErrorResponse, 409: ErrorResponse}


class BatchPath(Parameters):
    """The batch an address is about."""

    batch_id: str = Field(description="Id of the batch.")

    @property
    def possible_id(self) -> str:
        """The id, if a batch could have it.

        Raises:
            BatchNotFound: none can.
        """
        if not JOB_ID.fullmatch(self.batch_id):
            raise BatchNotFound(self.batch_id[:128])
        return self.batch_id


class BatchesQuery(Query):
    """Where to begin."""

    limit: int = Field(20, ge=1, le=100)
    after: str | None = Field(None, description="Id of the last batch of the page before.")


@bp.post(
    "/v1/batches",
    summary="Create a batch",
    request_body=body_of(bp, BatchRequest),
    responses={200: BatchObject, **dict.fromkeys((404, 409, 413, 415), ErrorResponse)},
)
def create(header: IdempotencyHeader) -> Response:
    """Run each line of a file as a request of its own, at the lowest priority.

    A repeated `Idempotency-Key` with the same body means the same batch, with another one it is a 409.
    What is wrong with the lines makes a batch that turns `failed`, with an entry for each bad line in `errors`.
    """
    asked = read_body(BatchRequest)
    check_webhook(services().settings, asked.webhook_url)
    expires = asked.output_expires_after
    batch = services().batches.create(
        asked.input_file_id,
        asked.endpoint,
        asked.completion_window,
        asked.metadata,
        expires.seconds if expires else None,
        header.checked_key,
        asked.webhook_url,
    )
    return jsonify(batch.shown())


@bp.get("/v1/batches", summary="List batches", responses={200: BatchList})
def list_batches(query: BatchesQuery) -> Response:
    """Batches, newest first."""
    try:
        found, more = services().batches.newest(query.after, query.limit)
    except KeyError:
        raise InvalidRequest(f"there is no batch {query.after!r} to go on after", "after") from None
    return jsonify(page([batch.shown() for batch in found], more))


@bp.get("/v1/batches/<batch_id>", summary="Look at a batch", responses={200: BatchObject, 404: ErrorResponse})
def look(path: BatchPath) -> Response:
    """The batch as it is now. Its result files can be read while it runs."""
    return jsonify(services().batches.get(path.possible_id).shown())


@bp.post("/v1/batches/<batch_id>/cancel", summary="Cancel a batch", responses=CHANGED)
def cancel(path: BatchPath) -> Response:
    """Start no more lines and stop those that run: `cancelling` at once, `cancelled` when each line has its row.

    Cancelling it again changes nothing; one that has ended otherwise is 409.
    """
    return jsonify(services().batches.cancel(path.possible_id).shown())


@bp.post("/v1/batches/<batch_id>/pause", summary="Pause a batch", responses=CHANGED)
def pause(path: BatchPath) -> Response:
    """Start no more lines until it is resumed; those that run go on. Its completion window runs on too."""
    return jsonify(services().batches.pause(path.possible_id).shown())


@bp.post("/v1/batches/<batch_id>/resume", summary="Resume a batch", responses=CHANGED)
def resume(path: BatchPath) -> Response:
    """Go on with a paused batch; one that is not paused stays as it is."""
    return jsonify(services().batches.resume(path.possible_id).shown())


@bp.post("/v1/batches/<batch_id>/retry", summary="Run failed lines again", responses=CHANGED)
def retry(path: BatchPath) -> Response:
    """Run the failed lines of an ended batch again, expired and cancelled ones included, in a new completion window.

    Their rows leave the error file, which is replaced by a new one; the rows of the output file stay.
    """
    return jsonify(services().batches.retry_failed(path.possible_id).shown())
