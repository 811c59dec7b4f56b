"""Files: upload, look at, list, read, delete."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote

from flask import Response, jsonify
from flask_openapi.models.media_type import MediaType
from flask_openapi.models.reference import Reference
from flask_openapi.models.request_body import RequestBody
from pydantic import Field

from shared.batches.schemas import FileDeleted, FileList, FileObject
from shared.errors import FileNotFound, InvalidRequest
from shared.files import StoredFile
from shared.names import JOB_ID
from shared.results import ErrorResponse
from webapi.describe import Parameters, Query, add_schema, blueprint
from webapi.services import services
from webapi.upload import UploadForm, receive

bp = blueprint("files", "files")

FORM = RequestBody(
    content={"multipart/form-data": MediaType(schema=Reference(**{"$ref": add_schema(bp, UploadForm)}))}, required=True
)
BYTES: dict[str, Any] = {
    "description": "The bytes of the file.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


class FilePath(Parameters):
    """The file an address is about."""

    file_id: str = Field(description="Id of the file.")

    @property
    def possible_id(self) -> str:
        """The id, if a file could have it.

        Raises:
            FileNotFound: none can.
        """
        if not JOB_ID.fullmatch(self.file_id):
            raise FileNotFound(self.file_id[:128])
        return self.file_id


class FilesQuery(Query):
    """Which files, and where to begin."""

    purpose: str | None = Field(None, description="`batch` or `batch_output`.")
    limit: int = Field(10_000, ge=1, le=10_000)
    after: str | None = Field(None, description="Id of the last file of the page before.")
    order: Literal["asc", "desc"] = Field("desc", description="Oldest or newest first.")


@bp.post(
    "/v1/files",
    summary="Upload a file",
    request_body=FORM,
    responses={200: FileObject, 413: ErrorResponse, 415: ErrorResponse},
)
def upload() -> Response:
    """Store the input of a batch: one request on each line, as JSON. Its lines are checked once a batch uses it."""
    given = services()
    return jsonify(receive(given.files, given.settings.max_file_bytes).shown())


@bp.get("/v1/files", summary="List files", responses={200: FileList})
def list_files(query: FilesQuery) -> Response:
    """Uploaded files and the results of batches."""
    try:
        found, more = services().files.newest(query.purpose, query.after, query.limit, query.order == "asc")
    except KeyError:
        raise InvalidRequest(f"there is no file {query.after!r} to go on after", "after") from None
    return jsonify(page([file.shown() for file in found], more))


def page(shown: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of a list, as OpenAI's lists are."""
    ids = [one["id"] for one in shown] or [None]
    return {"object": "list", "data": shown, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


@bp.get("/v1/files/<file_id>", summary="Look at a file", responses={200: FileObject, 404: ErrorResponse})
def look(path: FilePath) -> Response:
    """A file without its bytes. The results of a batch grow while it runs."""
    return jsonify(services().files.get(path.possible_id).shown())


@bp.get("/v1/files/<file_id>/content", summary="Read a file", responses={200: BYTES, 404: ErrorResponse})
def content(path: FilePath) -> Response:
    """The bytes of a file: of a batch's results, the rows there are by now, each of them whole."""
    file, chunks = services().files.content(path.possible_id)
    answer = Response(chunks, mimetype="application/octet-stream")
    answer.content_length = file.size
    # Whoever uploaded it chose the bytes: no browser shall take them for a page.
    answer.headers.set("Content-Disposition", "attachment", **_names(file))
    answer.headers["X-Content-Type-Options"] = "nosniff"
    return answer


def _names(file: StoredFile) -> dict[str, str]:
    """The name as a header can say it, which is ASCII. *Source:* RFC 6266, which wants a plain name besides."""
    if file.filename.isascii():
        return {"filename": file.filename}
    return {"filename": file.id, "filename*": f"UTF-8''{quote(file.filename, safe='')}"}


@bp.delete(
    "/v1/files/<file_id>",
    summary="Delete a file",
    responses={200: FileDeleted, 404: ErrorResponse, 409: ErrorResponse},
)
def delete(path: FilePath) -> Response:
    """Remove a file and its bytes; 409 while a batch that has not ended reads or writes it."""
    services().files.delete(path.possible_id)
    return jsonify(FileDeleted(id=path.possible_id, object="file", deleted=True).model_dump())
