"""Files: uploaded ones, and the results of batches. Their bytes are in the storage, all else in Redis.

An object that nothing refers to yet is entered in `names.TRASH` before it is written and taken out by the transaction
that makes it known, so that what a dead process left behind is deleted too.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, Literal, cast

import redis

from shared.errors import BatchState, FileNotFound, StorageUnavailable
from shared.lua import script
from shared.names import FILE_EXPIRY, FILES, TRASH, file_key, file_parts_key, file_users_key
from shared.paging import pages
from shared.settings import Settings
from shared.storage import Sink, Storage

log = logging.getLogger(__name__)

Purpose = Literal["batch", "batch_output"]

#: How long an object may be unknown before it counts as left behind.
UNKNOWN_S = 86_400

#: Bytes that are read at once where a file is sent.
CHUNK_BYTES = 256 * 1024

#: Objects that are taken from the trash at once.
TRASH_PAGE = 200


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as stored. Times are seconds since 1970."""

    id: str
    filename: str
    purpose: Purpose
    #: In bytes.
    size: int
    created_at: int
    expires_at: int | None

    @classmethod
    def parse(cls, file_id: str, raw: dict[bytes, bytes]) -> StoredFile:
        """From the hash that Redis holds."""
        expires = raw.get(b"expires_at")
        return cls(
            id=file_id,
            filename=raw[b"filename"].decode(),
            purpose=cast(Purpose, raw[b"purpose"].decode()),
            size=int(raw[b"bytes"]),
            created_at=int(raw[b"created_at"]),
            expires_at=int(expires) if expires else None,
        )

    def shown(self) -> dict[str, Any]:
        """The file object of the API (`FileObject`)."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Upload:
    """A file that is being written within the block of `FileStore.upload`; `FileStore.register` makes it known."""

    def __init__(self, file_id: str, sink: Sink) -> None:
        self.id = file_id
        self.size = 0
        self._sink = sink

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._sink.write(data)
        self.size += len(data)


class FileStore:
    """All operations on files. Safe to share between threads.

    Every method raises redis-py's own errors when Redis cannot be reached, and those that touch the storage
    StorageUnavailable. `clock` gives the seconds since 1970.
    """

    def __init__(
        self, client: redis.Redis, storage: Storage, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        self.client: Any = client  # redis-py types every reply as str or bytes or a promise of one
        self.storage = storage
        self.settings = settings
        self.clock = clock
        self._delete = script(client, "file_delete")

    # --- writing ---

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """Write the bytes of a new file. It is known only once it is registered, after the block."""
        file_id = new_file_id()
        name = _object_of(file_id)
        self._enter_trash(name, UNKNOWN_S)
        with self.storage.create(name) as sink:
            yield Upload(file_id, sink)

    def register(self, upload: Upload, filename: str, ttl_s: int | None = None) -> StoredFile:
        """Make an uploaded file known, with the purpose `batch`. It expires after `ttl_s`, or else `file_ttl_s`."""
        now = self.clock()
        expires_at = int(now) + (ttl_s or self.settings.file_ttl_s)
        file = StoredFile(upload.id, filename, "batch", upload.size, int(now), expires_at)
        fields = {n: file.shown()[n] for n in ("filename", "purpose", "bytes", "created_at", "expires_at")}
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(file_key(file.id), mapping=fields)
        pipe.zadd(FILES, {file.id: int(now * 1000)})
        pipe.zadd(FILE_EXPIRY, {file.id: expires_at})
        pipe.zrem(TRASH, _object_of(file.id))
        pipe.execute()
        return file

    def put(self, name: str, data: bytes, keep_s: float = UNKNOWN_S) -> None:
        """Write an object that is deleted after `keep_s`, unless it is made known before (a part, by its commit)."""
        self._enter_trash(name, keep_s)
        self.storage.write(name, data)

    def _enter_trash(self, name: str, keep_s: float) -> None:
        self.client.zadd(TRASH, {name: int(self.clock() + keep_s)})

    # --- reading ---

    def get(self, file_id: str) -> StoredFile:
        """The stored file. One that has expired but that an open batch uses is still there.

        Raises:
            FileNotFound: there is none.
        """
        (found,) = self._get_many([file_id])
        if found is None:
            raise FileNotFound(file_id)
        return found

    def _get_many(self, file_ids: Sequence[str]) -> list[StoredFile | None]:
        pipe = self.client.pipeline(transaction=False)
        for file_id in file_ids:
            pipe.hgetall(file_key(file_id))
            pipe.scard(file_users_key(file_id))
        replies = pipe.execute()
        return [
            self._if_there(file_id, raw, users)
            for file_id, raw, users in zip(file_ids, replies[::2], replies[1::2], strict=True)
        ]

    def _if_there(self, file_id: str, raw: dict[bytes, bytes], users: int) -> StoredFile | None:
        if not raw:
            return None
        file = StoredFile.parse(file_id, raw)
        expired = file.expires_at is not None and file.expires_at <= self.clock()
        return None if expired and not users else file

    def newest(
        self, purpose: str | None, after: str | None, limit: int, oldest_first: bool = False
    ) -> tuple[list[StoredFile], bool]:
        """At most `limit` files behind the file `after` in the list, and whether there are more.

        Raises:
            KeyError: `after` is not in the list.
        """
        found: list[StoredFile] = []
        for ids in pages(self.client, FILES, after, oldest_first):
            found += [f for f in self._get_many(ids) if f is not None and purpose in (None, f.purpose)]
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def open(self, file_id: str) -> BinaryIO:
        """Read an uploaded file: a buffered, seekable stream.

        Raises:
            FileNotFound: there is none, or its object is gone.
        """
        self.get(file_id)
        try:
            return self.storage.open(_object_of(file_id))
        except FileNotFoundError:
            raise FileNotFound(file_id) from None

    def parts(self, file_id: str) -> list[dict[str, Any]]:
        """The parts of a result file so far, in their order: `name`, `lines` (how many) and `bytes` of each."""
        return [json.loads(entry) for entry in self.client.lrange(file_parts_key(file_id), 0, -1)]

    def content(self, file_id: str) -> tuple[StoredFile, Iterator[bytes]]:
        """A file and its bytes, exactly as many as it says; of a result file, the parts there are now.

        The first bytes are read before this returns, so that what cannot be read is told now.

        Raises:
            FileNotFound: there is none, or an object of it is gone.
        """
        file = self.get(file_id)
        names = [_object_of(file_id)]
        if file.purpose == "batch_output":
            parts = self.parts(file_id)
            names = [part["name"] for part in parts]
            file = replace(file, size=sum(part["bytes"] for part in parts))
        chunks = self._chunks(file_id, names)
        return file, chain([next(chunks, b"")], chunks)

    def _chunks(self, file_id: str, names: Sequence[str]) -> Iterator[bytes]:
        for name in names:
            try:
                with self.storage.open(name) as stream:
                    yield from iter(partial(stream.read, CHUNK_BYTES), b"")
            except FileNotFoundError:
                raise FileNotFound(file_id) from None

    # --- removing ---

    def delete(self, file_id: str) -> None:
        """Remove a file.

        Raises:
            FileNotFound: there is none.
            BatchState: an open batch reads or writes it.
        """
        self.get(file_id)
        outcome = self._forget(file_id)
        if outcome == "missing":
            raise FileNotFound(file_id)
        if outcome == "in_use":
            raise BatchState(
                f"file {file_id!r} belongs to a batch that has not ended: cancel the batch first", "file_id"
            )
        try:
            self._empty_trash()
        except StorageUnavailable as error:
            log.warning("objects of file %s are deleted later: %s", file_id, error.message)

    def _forget(self, file_id: str) -> str:
        keys = [file_key(file_id), file_parts_key(file_id), file_users_key(file_id), FILES, FILE_EXPIRY, TRASH]
        return str(self._delete(keys=keys, args=[file_id, int(self.clock()), _object_of(file_id)]).decode())

    def sweep(self) -> int:
        """Remove expired files, and objects that are due to be deleted; how many objects went."""
        for raw in self.client.zrangebyscore(FILE_EXPIRY, "-inf", int(self.clock())):
            self._forget(raw.decode())
        return self._empty_trash()

    def _empty_trash(self) -> int:
        count = 0
        while due := self.client.zrangebyscore(TRASH, "-inf", int(self.clock()), 0, TRASH_PAGE):
            for name in due:
                self.storage.delete(name.decode())
                self.client.zrem(TRASH, name)
            count += len(due)
        return count


def new_file_id() -> str:
    """An id for a new file."""
    return f"file-{uuid.uuid4().hex}"


def _object_of(file_id: str) -> str:
    """The name of an uploaded file's object."""
    return f"files/{file_id}"
