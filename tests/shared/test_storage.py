"""One contract, over a folder and over fsspec's memory and local file systems. S3 is in `tests/integration`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from platformdirs import user_data_path

from shared import storage as module
from shared.errors import StorageUnavailable
from shared.settings import Settings, load
from shared.storage import FolderStorage, Storage, UrlStorage, storage_of


def at(url: str) -> Storage:
    return storage_of(load(Settings, {"files_url": url}))


@pytest.fixture(params=["folder", "file", "memory", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return at("memory://place")
    if request.param == "local":  # a file system with folders, as sftp:// is
        return UrlStorage(f"local://{tmp_path}/new folder")
    return at(f"file://{tmp_path}/new%20folder" if request.param == "file" else str(tmp_path / "new folder"))


def test_an_object_comes_back_as_it_was_written(storage: Storage) -> None:
    with storage.create("files/a") as sink:
        sink.write(b"one\n")
        sink.write(b"two\n")
    assert storage.size("files/a") == 8
    with storage.open("files/a") as stream:
        assert list(stream) == [b"one\n", b"two\n"]


def test_an_object_can_be_read_from_anywhere(storage: Storage) -> None:
    storage.write("a", bytes(range(200)))
    with storage.open("a") as stream:
        assert stream.seek(100) == 100
        assert stream.read(3) == bytes([100, 101, 102])
        assert stream.tell() == 103
        stream.seek(-2, os.SEEK_END)
        assert stream.read() == bytes([198, 199])
        assert stream.read() == b""
        stream.seek(1000)
        assert stream.read(1) == b""


def test_two_readers_of_one_object_are_apart(storage: Storage) -> None:
    storage.write("a", b"0123456789")
    with storage.open("a") as one, storage.open("a") as two:
        assert (one.read(4), two.read(2), one.read(2)) == (b"0123", b"01", b"45")


def test_an_object_larger_than_a_block_is_whole(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    data = os.urandom(3456)
    with storage.create("a") as sink:
        for start in range(0, len(data), 100):
            sink.write(data[start : start + 100])
    with storage.open("a") as stream:
        assert stream.read() == data


def test_an_empty_object_is_an_object(storage: Storage) -> None:
    storage.write("a", b"")
    assert storage.size("a") == 0
    with storage.open("a") as stream:
        assert stream.read() == b""


def test_an_object_whose_writing_fails_is_not_there(storage: Storage) -> None:
    with pytest.raises(RuntimeError), storage.create("files/a") as sink:
        sink.write(b"half")
        raise RuntimeError
    with pytest.raises(FileNotFoundError):
        storage.open("files/a")
    assert storage.list("files") == []


def test_an_object_is_replaced_whole(storage: Storage) -> None:
    storage.write("a", b"a long first one")
    storage.write("a", b"second")
    with storage.open("a") as stream:
        assert stream.read() == b"second"


def test_a_deleted_object_is_gone_and_deleting_it_again_is_no_error(storage: Storage) -> None:
    storage.write("files/a", b"1")
    storage.delete("files/a")
    storage.delete("files/a")
    storage.delete("never/was")
    for look in (storage.open, storage.size):
        with pytest.raises(FileNotFoundError):
            look("files/a")


def test_objects_are_listed_in_order_and_only_those_of_the_folder(storage: Storage) -> None:
    for name in ("b/2", "b/1", "b/c/3", "other"):
        storage.write(name, b"")
    assert storage.list("b") == ["b/1", "b/2"]
    assert storage.list("nothing") == []


def test_left_out_it_is_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    found = at("")
    assert isinstance(found, FolderStorage)
    assert found._root == user_data_path("slotline") / "files"


# --- a folder ---


def test_in_a_folder_an_object_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def fsync(file: int) -> None:
        os.fsync(file)
        seen.append(sorted(path.name for path in (tmp_path / "b").iterdir()))

    storage = storage_of(load(Settings, {"files_url": str(tmp_path)}), fsync)
    storage.write("b/a", b"1")
    assert seen == [[".a.new"], ["a"]]  # the file, then the folder


def test_what_is_being_written_is_not_listed_and_goes_with_its_object(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    with storage.create("b/a") as sink:
        sink.write(b"1")
        assert storage.list("b") == []
    (tmp_path / "b" / ".a.new").write_bytes(b"left by a kill")
    storage.delete("b/a")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_vanishes_while_an_object_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    mkdir = Path.mkdir

    def and_gone(self: Path, *args: object, **kwargs: object) -> None:
        mkdir(self, parents=True, exist_ok=True)
        if not made:
            self.rmdir()  # by another process
        made.append(self)

    monkeypatch.setattr(Path, "mkdir", and_gone)
    storage = FolderStorage(tmp_path)
    storage.write("b/a", b"1")
    assert storage.list("b") == ["b/a"]
    assert len(made) == 2


def raising(number: int) -> Callable[[int], None]:
    def fsync(file: int) -> None:
        raise OSError(number, os.strerror(number), "/secret/place")

    return fsync


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_told_without_a_path_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    storage = FolderStorage(tmp_path, raising(number))
    with pytest.raises(StorageUnavailable) as refused:
        storage.write("a", b"1")
    assert os.strerror(number) in refused.value.message
    assert "SLOTLINE_FILES_URL" in refused.value.message
    assert "/secret" not in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_folder_should_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    storage = FolderStorage(tmp_path / "taken")
    for act in (lambda: storage.write("a/b", b""), lambda: storage.open("a/b"), lambda: storage.delete("a/b")):
        with pytest.raises(StorageUnavailable):
            act()


# --- a URL ---


def test_an_unknown_protocol_is_told_by_the_first_use() -> None:
    storage = at("s9://bucket/x")
    with pytest.raises(StorageUnavailable, match="s9"):
        storage.write("a", b"")


def test_a_missing_package_is_told_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_s3fs(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", without_s3fs)
    with pytest.raises(StorageUnavailable, match=r"slotline\[s3\]"):
        at("s3://bucket").size("a")


def test_what_the_librarys_own_errors_say_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        pass

    storage = at("memory://place")
    storage.write("a", b"1")
    memory = fsspec.filesystem("memory")

    def refuse(*args: object, **kwargs: object) -> None:
        raise NoCredentials("Unable to locate credentials")

    stream = storage.open("a")
    for name in ("cat_file", "info", "rm_file", "ls", "open"):
        monkeypatch.setattr(memory, name, refuse)
    with stream, pytest.raises(StorageUnavailable, match="locate credentials"):
        stream.read()
    acts = (storage.size, storage.open, storage.delete, storage.list, lambda name: storage.write(name, b""))
    for act in acts:
        with pytest.raises(StorageUnavailable, match="locate credentials"):
            act("a")
