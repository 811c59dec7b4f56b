"""The server's files and batches, as `POST /v1/files` and `POST /v1/batches` make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slotline.transport import Transport

#: How long the server may be silent while it stores a file.
STORE_S = 300.0

#: How long a batch has: what has not run by then expires.
WINDOW = "7d"


class Files:
    """Files on the server."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def upload(self, path: Path, name: str | None = None, purpose: str = "batch") -> dict[str, Any]:
        """Store a file under a name, its own unless another is given; returns its object.

        Raises:
            ApiError: the server refused it, for instance because it is too large.
            ConnectionFailed: the answer was lost; it may have been stored.
        """
        with path.open("rb") as content:
            file: dict[str, Any] = self._transport.once(
                "POST",
                "/v1/files",
                timeout_s=STORE_S,
                files={"file": (name or path.name, content, "application/jsonl")},
                data={"purpose": purpose},
            )
        return file

    def info(self, file_id: str) -> dict[str, Any]:
        """A file's object."""
        file: dict[str, Any] = self._transport.call("GET", f"/v1/files/{quote(file_id, safe='')}")
        return file

    def content(self, file_id: str) -> Iterator[bytes]:
        """What a file holds, piece by piece."""
        return self._transport.download(f"/v1/files/{quote(file_id, safe='')}/content")

    def delete(self, file_id: str) -> dict[str, Any]:
        """Remove a file."""
        answer: dict[str, Any] = self._transport.call("DELETE", f"/v1/files/{quote(file_id, safe='')}")
        return answer


class Batches:
    """Batches on the server. Each method gives the batch's object."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self, file_id: str, endpoint: str, completion_window: str = WINDOW, metadata: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Start a batch over an uploaded file.

        Raises:
            ConnectionFailed: the answer was lost; it may have started.
        """
        body: dict[str, Any] = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": completion_window,
        }
        if metadata:
            body["metadata"] = dict(metadata)
        batch: dict[str, Any] = self._transport.once("POST", "/v1/batches", timeout_s=STORE_S, json=body)
        return batch

    def info(self, batch_id: str) -> dict[str, Any]:
        """How far it has come."""
        batch: dict[str, Any] = self._transport.call("GET", _path(batch_id))
        return batch

    def list(self, **filters: Any) -> dict[str, Any]:
        """One page of batches, newest first. `filters` are `limit` and `after`."""
        page: dict[str, Any] = self._transport.call("GET", "/v1/batches", params=filters)
        return page

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """End it; what has run keeps its row."""
        return self._do(batch_id, "cancel")

    def pause(self, batch_id: str) -> dict[str, Any]:
        """Start no more of its lines until it is resumed."""
        return self._do(batch_id, "pause")

    def resume(self, batch_id: str) -> dict[str, Any]:
        """Go on after a pause."""
        return self._do(batch_id, "resume")

    def retry(self, batch_id: str) -> dict[str, Any]:
        """Run its failed lines again, once it has ended."""
        return self._do(batch_id, "retry")

    def _do(self, batch_id: str, what: str) -> dict[str, Any]:
        batch: dict[str, Any] = self._transport.call("POST", f"{_path(batch_id)}/{what}")
        return batch


def _path(batch_id: str) -> str:
    return f"/v1/batches/{quote(batch_id, safe='')}"
