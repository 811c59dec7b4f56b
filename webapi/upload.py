"""Receiving a file: the form is taken apart as it comes, so that no more than a piece of it is in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

from flask import request
from pydantic import Field, ValidationError, field_validator
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, UnsupportedMediaType
from werkzeug.sansio.multipart import Data, Epilogue, Event, File, MultipartDecoder, NeedData
from werkzeug.sansio.multipart import Field as FormField

from shared.batches.schemas import ExpiresAfter
from shared.errors import BodyTooLarge, InvalidRequest
from shared.files import FileStore, StoredFile, Upload
from shared.schemas import Strict
from shared.validation import invalid

#: Bytes read from the connection at once.
PIECE_BYTES = 64 * 1024
#: What may come beside the file: the other fields, the headers of the parts.
FORM_BYTES = 256 * 1024
FORM_PARTS = 16
FIELD_BYTES = 1024
NAME_LENGTH = 255


class UploadForm(Strict):
    """The form of an upload."""

    file: str = Field(description="The file, with its name.", json_schema_extra={"format": "binary"})
    purpose: Literal["batch"] = Field(description="Files are the input of batches here, and nothing else.")
    expires_after: ExpiresAfter | None = Field(
        None, description="Left out, a file is kept for the server's `file_ttl_s`, 30 days unless changed."
    )

    @field_validator("file")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        """The last part of a path, without what cannot be seen."""
        name = "".join(c for c in re.split(r"[/\\]", value)[-1] if c.isprintable()).strip()
        if len(name) > NAME_LENGTH:
            raise ValueError(f"its name has {len(name)} characters; {NAME_LENGTH} are possible")
        return name or "upload"


def receive(files: FileStore, max_bytes: int) -> StoredFile:
    """Store the file of the current request's form, which may have at most so many bytes.

    Raises:
        UnsupportedMediaType: the body is no form with a file.
        InvalidRequest: the form is broken, or a field is wrong or missing.
        BodyTooLarge: the file is too large.
        StorageUnavailable: there is no place for it.
    """
    boundary = _boundary()
    # Said before anything is read, to whom says the length before.
    if (request.content_length or 0) > max_bytes + FORM_BYTES:
        _too_large(max_bytes)
    request.max_content_length = max_bytes + FORM_BYTES
    with files.upload() as upload:
        try:
            form = _checked(_read(_events(boundary), upload, max_bytes))
        except RequestEntityTooLarge:
            _too_large(max_bytes)
    ttl_s = form.expires_after.seconds if form.expires_after else None
    return files.register(upload, form.file, ttl_s)


def _boundary() -> bytes:
    if request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise InvalidRequest("a page of another site may not upload files here")
    boundary = request.mimetype_params.get("boundary", "")
    if request.mimetype != "multipart/form-data" or not boundary:
        raise UnsupportedMediaType("send the file as a form, multipart/form-data, with the fields `file` and `purpose`")
    return boundary.encode()


def _too_large(max_bytes: int) -> NoReturn:
    raise BodyTooLarge(f"the file is larger than {max_bytes} bytes (SLOTLINE_MAX_FILE_BYTES)", "file")


def _events(boundary: bytes) -> Iterator[Event]:
    """The parts of the form as they come."""
    decoder = MultipartDecoder(boundary, FORM_BYTES, max_parts=FORM_PARTS)
    while True:
        try:
            event = decoder.next_event()
        except ValueError as error:
            raise InvalidRequest(f"the form cannot be read: {error}") from None
        if isinstance(event, NeedData):
            decoder.receive_data(_piece())
        else:
            yield event
            if isinstance(event, Epilogue):
                return


def _piece() -> bytes | None:
    """The next bytes of the body; None at its end."""
    try:
        return request.stream.read(PIECE_BYTES) or None
    except HTTPException:
        raise
    except Exception as error:
        # The server's own parser of a chunked body, or a connection that broke in the middle of one.
        raise InvalidRequest(f"the body cannot be read: {error}") from None


def _read(events: Iterator[Event], upload: Upload, max_bytes: int) -> dict[str, str]:
    """Pass the file on to the upload, and give the fields: the file's name for the file."""
    found: dict[str, str] = {}
    for event in events:
        if isinstance(event, (File, FormField)):
            name, value = event.name or "", b""
            if not name:
                raise InvalidRequest("a part of the form has no name")
            if name in found:
                raise InvalidRequest(f"`{name}` is in the form twice", name)
            if (name == "file") != isinstance(event, File):
                kind = "the file, with a file name" if name == "file" else "text, without a file name"
                raise InvalidRequest(f"`{name}` must be {kind}", name)
            found[name] = event.filename if isinstance(event, File) else ""
        elif isinstance(event, Data) and name == "file":
            upload.write(event.data)
            if upload.size > max_bytes:
                _too_large(max_bytes)
        elif isinstance(event, Data):
            value += event.data
            found[name] = _text(name, value)
    return found


def _text(name: str, value: bytes) -> str:
    if len(value) > FIELD_BYTES:
        raise InvalidRequest(f"`{name}` is longer than {FIELD_BYTES} bytes", name)
    return value.decode("utf-8", "replace")


def _checked(fields: dict[str, str]) -> UploadForm:
    if "purpose" in fields and fields["purpose"] != "batch":
        raise InvalidRequest("`purpose` must be `batch`: files are the input of batches here, nothing else", "purpose")
    try:
        return UploadForm.model_validate(_nested(fields))
    except ValidationError as error:
        raise invalid(error, UploadForm.model_fields) from None


def _nested(fields: dict[str, str]) -> dict[str, Any]:
    """`expires_after[seconds]`, as forms write it, as a number within an object."""
    whole: dict[str, Any] = {}
    for name, value in fields.items():
        inner = re.fullmatch(r"expires_after\[(\w+)\]", name)
        if inner is None:
            whole[name] = value
        else:
            number = inner[1] == "seconds" and re.fullmatch("[0-9]{1,9}", value)
            whole.setdefault("expires_after", {})[inner[1]] = int(value) if number else value
    return whole
