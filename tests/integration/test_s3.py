"""Files in S3, which moto serves here: the storage itself, and the real server with gevent around asyncio."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import fsspec.asyn
import fsspec.config
import pytest
from openai import InternalServerError, OpenAI

from shared.errors import StorageUnavailable
from shared.storage import BLOCK_BYTES, UrlStorage
from tests.integration.conftest import StartWeb
from tests.processes import eventually

pytestmark = pytest.mark.integration

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that speaks S3, and this process set up to use it."""
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield eventually(lambda: _address(process, log), "moto listens")
    finally:
        process.terminate()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str | None:
    assert process.poll() is None, log.read_text()
    return next((word for word in log.read_text().split() if word.startswith("http://127.0.0.1:")), None)


@pytest.fixture(scope="module")
def bucket(endpoint: str) -> Iterator[str]:
    """URL of an empty bucket. fsspec's threads start here and stay, as they do in any process."""
    before = dict(os.environ)
    os.environ.update(CREDENTIALS)
    fsspec.config.conf["s3"] = {"endpoint_url": endpoint}
    loop = fsspec.asyn.get_loop()
    threads = ThreadPoolExecutor(1)
    asyncio.run_coroutine_threadsafe(_use(threads), loop).result()
    threads.submit(int).result()
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket/place"
    del fsspec.config.conf["s3"]
    os.environ.clear()
    os.environ.update(before)


async def _use(threads: ThreadPoolExecutor) -> None:
    asyncio.get_running_loop().set_default_executor(threads)


@pytest.fixture
def storage(bucket: str) -> UrlStorage:
    return UrlStorage(bucket)


def test_an_object_of_several_blocks_comes_back_as_it_was_written(storage: UrlStorage) -> None:
    data = os.urandom(2 * BLOCK_BYTES + 12345)
    with storage.create("files/a") as sink:
        for start in range(0, len(data), 1_000_000):
            sink.write(data[start : start + 1_000_000])
    assert storage.size("files/a") == len(data)
    with storage.open("files/a") as stream:
        assert stream.read(10) == data[:10]
        stream.seek(BLOCK_BYTES - 5)
        assert stream.read(10) == data[BLOCK_BYTES - 5 : BLOCK_BYTES + 5]
        assert stream.read() == data[BLOCK_BYTES + 5 :]
    assert storage.list("files") == ["files/a"]
    storage.delete("files/a")
    assert storage.list("files") == []


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES + 1])
def test_an_object_whose_writing_fails_never_appears(storage: UrlStorage, size: int) -> None:
    with pytest.raises(RuntimeError), storage.create("files/half") as sink:
        sink.write(b"x" * size)
        raise RuntimeError
    with pytest.raises(FileNotFoundError):
        storage.open("files/half")
    assert storage.list("files") == []


def test_an_object_appears_only_once_it_is_whole(storage: UrlStorage) -> None:
    with storage.create("files/b") as sink:
        sink.write(b"x" * (BLOCK_BYTES + 1))
        assert storage.list("files") == []
    assert storage.list("files") == ["files/b"]
    storage.delete("files/b")
    storage.delete("files/b")


def test_what_another_process_wrote_since_is_seen(storage: UrlStorage, bucket: str) -> None:
    assert storage.list("files") == []
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    other.pipe_file(f"{bucket}/files/new", b"1")
    assert storage.list("files") == ["files/new"]
    other.pipe_file(f"{bucket}/files/new", b"longer")
    assert storage.size("files/new") == 6
    storage.delete("files/new")


def test_a_bucket_that_is_not_there_is_told(bucket: str) -> None:
    with pytest.raises(StorageUnavailable, match="bucket does not exist"):
        UrlStorage("s3://nobody/x").write("files/a", b"1")


def test_the_server_keeps_files_in_s3(
    bucket: str, endpoint: str, start_web: StartWeb, storage: UrlStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", endpoint)
    web = start_web(files_url=bucket)
    data = os.urandom(2 * BLOCK_BYTES + 7)
    with OpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        assert file.bytes == len(data)
        assert storage.list("files") == [f"files/{file.id}"]
        with ThreadPoolExecutor(4) as pool:  # readers at once share the one event loop
            for content in pool.map(lambda _: client.files.content(file.id).content, range(4)):
                assert content == data
        assert client.files.delete(file.id).deleted
    assert storage.list("files") == []
    assert "Traceback" not in web.log()


def test_the_server_without_credentials_says_so(
    endpoint: str, bucket: str, start_web: StartWeb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", endpoint)
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    web = start_web(files_url=bucket)
    with OpenAI(base_url=f"{web.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(InternalServerError) as refused:
            client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert refused.value.status_code == 503
        assert refused.value.code == "storage_unavailable"
        assert "credentials" in refused.value.message
        assert client.files.list().data == []
