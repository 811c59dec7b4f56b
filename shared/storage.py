"""Where files are: a folder, or anything that fsspec has a URL for.

Objects have names such as `files/ID`. An object is written once (a manifest is replaced whole) and found by the name
that Redis holds: nothing is ever looked for by listing, so that an object somebody still writes is never read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from platformdirs import user_data_path

from shared.errors import StorageUnavailable
from shared.settings import Settings

#: Bytes asked for at once of a remote object, and sent at once to it. S3 takes no smaller ones.
BLOCK_BYTES = 5 * 1024 * 1024


class Sink(Protocol):
    """What an object is written to."""

    def write(self, data: bytes, /) -> int:
        """Append bytes."""
        ...


class Storage(Protocol):
    """A folder or a bucket. Safe to share between threads.

    Every method raises StorageUnavailable for what the storage refuses: no permission, no credentials, disk full.
    """

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Write an object. It is there, and on disk, once the block ends; not at all where the block raises."""
        raise NotImplementedError
        yield

    def write(self, name: str, data: bytes) -> None:
        """Write a whole object, in place of one that is there."""
        with self.create(name) as sink:
            sink.write(data)

    def open(self, name: str) -> BinaryIO:
        """Read an object: a buffered, seekable stream.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    def size(self, name: str) -> int:
        """Bytes of an object.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Names of the objects directly below `prefix`, a folder's name, in order."""
        ...


def storage_of(settings: Settings, fsync: Callable[[int], None] = os.fsync) -> Storage:
    """The storage that `files_url` names; left out, the folder `files` of the user's data directory.

    Nothing is opened or made yet: a URL that cannot be used is told by whatever is done first.

    Args:
        settings: where it is.
        fsync: how a file in a folder is brought to the disk, which may take seconds.
    """
    url = settings.files_url
    if not url:
        return FolderStorage(user_data_path("slotline") / "files", fsync)
    if url.startswith("file://"):
        return FolderStorage(Path(unquote(urlsplit(url).path)), fsync)
    return UrlStorage(url) if "://" in url else FolderStorage(Path(url).expanduser(), fsync)


class FolderStorage(Storage):
    """Objects as files below a folder, which is made when it is needed."""

    def __init__(self, root: Path, fsync: Callable[[int], None] = os.fsync) -> None:
        self._root = root
        self._fsync = fsync

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Write beside the object and put it in its place; a crash leaves the old one or the new one."""
        path, beside = self._root / name, self._beside(name)
        with _told("write"):
            file = _open_new_file(beside)
        try:
            with file:
                yield _Told(file)
                with _told("write"):
                    file.flush()
                    self._fsync(file.fileno())
            with _told("write"):
                beside.replace(path)
                self._sync_folder(path.parent)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _sync_folder(self, folder: Path) -> None:
        """Bring a renaming to the disk."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            self._fsync(handle)
        finally:
            os.close(handle)

    def _beside(self, name: str) -> Path:
        """Where an object is while it is being written. It follows from the name, so that `delete` finds it too."""
        path = self._root / name
        return path.with_name(f".{path.name}.new")

    def open(self, name: str) -> BinaryIO:
        """The file itself."""
        with _told("read", missing=True):
            return (self._root / name).open("rb")

    def size(self, name: str) -> int:
        """Bytes of the file."""
        with _told("read", missing=True):
            return (self._root / name).stat().st_size

    def delete(self, name: str) -> None:
        """Remove the file, what was left of writing it, and a folder that is empty then."""
        with _told("delete"):
            (self._root / name).unlink(missing_ok=True)
            self._beside(name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or gone
            (self._root / name).parent.rmdir()

    def list(self, prefix: str) -> list[str]:
        """Names of the files; those being written are none yet."""
        with _told("list"):
            folder = self._root / prefix
            found = folder.iterdir() if folder.is_dir() else ()
            return sorted(f"{prefix}/{p.name}" for p in found if p.is_file() and not p.name.startswith("."))


class UrlStorage(Storage):
    """Objects behind a URL of fsspec's. An object store makes an object appear whole; others may show it growing.

    Credentials, endpoints and other options come from fsspec's own configuration and that of the service's library.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def load(self) -> None:
        """Load the library that the URL needs, which can take a second; else whatever is done first does."""
        _ = self._place

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system and the path in it. fsspec and the service's library are loaded only when they are used."""
        import fsspec

        with _told("use", hint=_package_of(self._url)):
            fs, root = fsspec.url_to_fs(self._url)
            return fs, root.rstrip("/")

    def _at(self, name: str) -> tuple[Any, str]:
        fs, root = self._place
        return fs, f"{root}/{name}"

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Write the object, in blocks where it is large."""
        fs, path = self._at(name)
        with _told("write"):
            file = _open_new(fs, path)
        try:
            yield _Told(file)
            with _told("write"):
                file.close()
        except BaseException:
            with _told("delete"):
                _discard(file)
            self.delete(name)
            raise

    def open(self, name: str) -> BinaryIO:
        """A stream that asks for one block after the other."""
        fs, path = self._at(name)
        return io.BufferedReader(_RemoteObject(fs, path, self.size(name)), BLOCK_BYTES)

    def size(self, name: str) -> int:
        """Bytes of the object."""
        fs, path = self._at(name)
        with _told("read", missing=True):
            fs.invalidate_cache()  # what other processes wrote since is not in it
            return int(fs.info(path)["size"])

    def delete(self, name: str) -> None:
        """Remove the object."""
        fs, path = self._at(name)
        with _told("delete"), suppress(FileNotFoundError):
            fs.rm_file(path)

    def list(self, prefix: str) -> list[str]:
        """Names of the objects."""
        fs, path = self._at(prefix)
        with _told("list"):
            fs.invalidate_cache()
            with suppress(FileNotFoundError):
                found = [e["name"] for e in fs.ls(path, detail=True) if e["type"] == "file"]
                return sorted(f"{prefix}/{name.rsplit('/', 1)[-1]}" for name in found)
            return []


class _RemoteObject(io.RawIOBase):
    """An object read range by range. Nothing stays open in between, however long the reader takes."""

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs = fs
        self._path = path
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readall(self) -> bytes:
        # The one that is inherited reads in portions of 8 kB.
        return b"".join(iter(lambda: self.read(BLOCK_BYTES) or b"", b""))

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        with _told("read", missing=True):
            data = self._fs.cat_file(self._path, start=self._position, end=end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Told:
    """A sink whose errors say what they mean to us."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        """Append bytes."""
        with _told("write"):
            return int(self._file.write(data))


@contextmanager
def _told(doing: str, missing: bool = False, hint: str = "") -> Iterator[None]:
    """Make StorageUnavailable of whatever a storage's library raises; with `missing`, not of FileNotFoundError."""
    try:
        yield
    except Exception as error:
        # Each service's library has errors of its own, which have no common root.
        if missing and isinstance(error, FileNotFoundError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        message = f"cannot {doing} files where SLOTLINE_FILES_URL says: {reason}{hint}"
        raise StorageUnavailable(message) from error


def _package_of(url: str) -> str:
    return "; pip install 'slotline[s3]'" if url.startswith("s3") else ""


def _open_new_file(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return path.open("wb")
    except FileNotFoundError:  # whoever deleted the last object in the folder removed it just now
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")


def _open_new(fs: Any, path: str) -> Any:
    try:
        return fs.open(path, "wb", block_size=BLOCK_BYTES)
    except FileNotFoundError:  # not an object store, so that a folder has to be there first
        fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        return fs.open(path, "wb", block_size=BLOCK_BYTES)


def _discard(file: Any) -> None:
    """Give up a new object. Only to close it would store what was written so far."""
    from fsspec.spec import AbstractBufferedFile

    if not isinstance(file, AbstractBufferedFile):
        file.close()
    elif not file.closed:
        file.discard()
        file.closed = True  # or its finaliser would send the rest
