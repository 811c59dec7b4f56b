"""Files in Redis and in a folder: known, kept, expired and removed, whatever dies in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from shared.errors import FileNotFound, StorageUnavailable
from shared.files import CHUNK_BYTES, UNKNOWN_S, FileStore, StoredFile
from shared.names import FILES, TRASH
from shared.settings import Settings
from shared.storage import FolderStorage, Sink


class Clock:
    now = 1_800_000_000.5

    def __call__(self) -> float:
        return self.now


class Sick(FolderStorage):
    """A storage that can be made to refuse."""

    refuses = False

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        self._check()
        with super().create(name) as sink:
            yield sink

    def delete(self, name: str) -> None:
        self._check()
        super().delete(name)

    def _check(self) -> None:
        if self.refuses:
            raise StorageUnavailable("out of order")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(tmp_path: Path) -> Sick:
    return Sick(tmp_path)


@pytest.fixture
def files(client: redis.Redis, storage: Sick, settings: Settings, clock: Clock) -> FileStore:
    return FileStore(client, storage, settings, clock)


def make(files: FileStore, data: bytes = b"data", name: str = "in.jsonl", ttl_s: int | None = None) -> StoredFile:
    with files.upload() as upload:
        upload.write(data)
    return files.register(upload, name, ttl_s)


def objects(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_comes_back_as_it_was_given(files: FileStore) -> None:
    data = b"x" * (2 * CHUNK_BYTES + 7)
    file = make(files, data, "ö.jsonl")
    assert files.get(file.id) == file
    assert (file.size, file.filename, file.purpose, file.created_at) == (len(data), "ö.jsonl", "batch", 1_800_000_000)
    known, chunks = files.content(file.id)
    pieces = list(chunks)
    assert (known, b"".join(pieces)) == (file, data)
    assert max(map(len, pieces)) <= CHUNK_BYTES
    with files.open(file.id) as stream:
        assert stream.seek(5) == 5
        assert stream.read() == data[5:]


def test_a_file_is_known_only_once_it_is_registered(files: FileStore, client: redis.Redis, tmp_path: Path) -> None:
    with files.upload() as upload:
        upload.write(b"data")
    with pytest.raises(FileNotFound):
        files.get(upload.id)
    assert client.zcard(TRASH) == 1
    files.register(upload, "x")
    assert client.zcard(TRASH) == 0
    assert objects(tmp_path) == [upload.id]


def test_what_a_dead_process_left_behind_is_deleted_after_a_day(
    files: FileStore, clock: Clock, storage: Sick, tmp_path: Path
) -> None:
    with files.upload() as upload:  # and never registered
        upload.write(b"data")
    beside = storage._beside(f"files/{upload.id}")
    beside.write_bytes(b"half")  # as a kill leaves it
    clock.now += UNKNOWN_S - 2
    assert files.sweep() == 0
    clock.now += 3
    assert files.sweep() == 1
    assert objects(tmp_path) == []


def test_an_upload_that_fails_leaves_nothing(files: FileStore, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), files.upload() as upload:
        upload.write(b"half")
        raise RuntimeError
    assert objects(tmp_path) == []


def test_a_file_expires_after_its_time_and_its_bytes_with_the_next_sweep(
    files: FileStore, clock: Clock, tmp_path: Path, client: redis.Redis
) -> None:
    short, long = make(files, ttl_s=3600), make(files)
    assert long.expires_at == long.created_at + files.settings.file_ttl_s
    clock.now += 3600
    with pytest.raises(FileNotFound):
        files.get(short.id)
    assert files.newest(None, None, 10) == ([long], False)
    assert objects(tmp_path) == sorted([short.id, long.id])
    assert files.sweep() == 1
    assert objects(tmp_path) == [long.id]
    assert client.zrange(FILES, 0, -1) == [long.id.encode()]
    assert files.get(long.id) == long


def test_a_delete_counts_although_the_storage_refuses_and_the_bytes_go_later(
    files: FileStore, storage: Sick, tmp_path: Path
) -> None:
    file = make(files)
    storage.refuses = True
    files.delete(file.id)
    with pytest.raises(FileNotFound):
        files.get(file.id)
    with pytest.raises(StorageUnavailable):
        files.sweep()
    assert objects(tmp_path) == [file.id]
    storage.refuses = False
    assert files.sweep() == 1
    assert objects(tmp_path) == []


def test_an_object_without_an_owner_is_kept_as_long_as_was_said(files: FileStore, clock: Clock, tmp_path: Path) -> None:
    files.put("batches/b/manifest.json", b"1", keep_s=100)
    files.put("batches/b/manifest.json", b"2", keep_s=200)
    clock.now += 150
    assert files.sweep() == 0
    assert (tmp_path / "batches/b/manifest.json").read_bytes() == b"2"
    clock.now += 51
    assert files.sweep() == 1
    assert not (tmp_path / "batches/b").exists()


def test_a_sweep_of_nothing_is_nothing(files: FileStore) -> None:
    assert files.sweep() == 0


def test_bytes_that_are_gone_are_told_before_anything_is_sent(files: FileStore, tmp_path: Path) -> None:
    file = make(files)
    (tmp_path / "files" / file.id).unlink()
    with pytest.raises(FileNotFound):
        files.content(file.id)
    with pytest.raises(FileNotFound):
        files.open(file.id)


def test_the_list_goes_on_where_it_was_left_in_both_directions(files: FileStore, clock: Clock) -> None:
    made = []
    for _ in range(5):
        clock.now += 1
        made.append(make(files))
    assert files.newest(None, None, 3) == (made[:1:-1], True)
    assert files.newest(None, made[2].id, 3) == ([made[1], made[0]], False)
    assert files.newest(None, made[2].id, 1, oldest_first=True) == ([made[3]], True)
    assert files.newest("batch_output", None, 3) == ([], False)
    with pytest.raises(KeyError):
        files.newest(None, "file-none", 3)
