"""The state of batches, over a real Valkey and a clock that the test moves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from openai.types import Batch

from shared.batches.records import Lines, Usage
from shared.batches.schemas import BatchObject, BatchRequest, window_seconds
from shared.batches.store import BatchStore, LeaseLost, Part
from shared.errors import BatchNotFound, BatchState, FileNotFound, InvalidRequest, RedisUnavailable
from shared.files import FileStore, StoredFile
from shared.names import BATCHES, OPEN_BATCHES, TRASH, batch_done_key, batch_failed_key, batch_key, batch_lease_key
from shared.settings import Settings, load
from shared.storage import FolderStorage

LEASE_S = 60.0


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A store, its files, and the runner of one batch."""

    def __init__(self, client: redis.Redis, settings: Settings, folder: Path) -> None:
        self.client: Any = client
        self.clock = Clock()
        self.settings = settings
        self.store = BatchStore(client, settings, self.clock)
        self.files = FileStore(client, FolderStorage(folder), settings, self.clock)
        self.count = 0

    def upload(self, data: bytes = b"{}\n") -> StoredFile:
        with self.files.upload() as upload:
            upload.write(data)
        return self.files.register(upload, "in.jsonl")

    def create(self, window: str = "24h", **fields: Any) -> str:
        return self.store.create(self.upload().id, "/v1/chat/completions", window, **fields).id

    def acquire(self, batch: str) -> int:
        fence = self.store.acquire(batch, "runner", LEASE_S)
        assert fence is not None
        return fence

    def running(self, total: int = 10, **fields: Any) -> tuple[str, int]:
        batch = self.create(**fields)
        fence = self.acquire(batch)
        assert self.store.start(batch, fence, total, "tiny") == "in_progress"
        return batch, fence

    def part(self, which: Any, *numbers: int, data: bytes = b"row\n") -> Part:
        self.count += 1
        name = f"batches/b/{self.count}.{which}.jsonl"
        rows = data * len(numbers)
        self.files.put(name, rows)
        return Part(which, name, numbers, len(rows))

    def commit(self, batch: str, fence: int, *parts: Part, usage: Usage | None = None) -> str:
        return self.store.commit_part(batch, fence, parts, usage or Usage())

    def counts(self, batch: str) -> tuple[int, int, int]:
        found = self.store.get(batch)
        return found.completed, found.failed, found.total

    def ended(self, completed: int = 2, failed: int = 1, status: Any = "completed") -> str:
        """A batch of some lines that has ended."""
        batch, fence = self.running(completed + failed)
        if completed:
            self.commit(batch, fence, self.part("output", *range(1, completed + 1)))
        if failed:
            self.commit(batch, fence, self.part("error", *range(completed + 1, completed + failed + 1)))
        assert self.store.finish(batch, fence, status) == status
        return batch


@pytest.fixture
def world(client: redis.Redis, settings: Settings, tmp_path: Path) -> World:
    return World(client, settings, tmp_path)


# --- a new batch ---


def test_a_new_batch_is_validating_and_open(world: World) -> None:
    file = world.upload()
    batch = world.store.create(file.id, "/v1/completions", "7d", {"team": "blue"})
    assert (batch.status, batch.endpoint, batch.input_file_id) == ("validating", "/v1/completions", file.id)
    assert (batch.total, batch.completed, batch.failed, batch.paused, batch.is_ended) == (0, 0, 0, False, False)
    assert batch.expires_at - batch.created_at == 7 * 86_400
    assert batch.metadata == {"team": "blue"}
    assert world.store.open_batches() == [batch]


def test_a_batch_needs_its_input_file(world: World) -> None:
    with pytest.raises(FileNotFound):
        world.store.create("file-none", "/v1/completions", "24h")
    assert world.client.dbsize() == 0


def test_an_expired_file_is_no_input_although_nobody_swept_it_yet(world: World) -> None:
    file = world.upload()
    world.clock.now += world.settings.file_ttl_s
    with pytest.raises(FileNotFound):
        world.store.create(file.id, "/v1/completions", "24h")
    assert world.store.open_batches() == []


def test_results_of_a_batch_are_no_input(world: World) -> None:
    output = world.store.get(world.ended()).output_file_id
    assert output is not None
    with pytest.raises(InvalidRequest, match="purpose") as refused:
        world.store.create(output, "/v1/completions", "24h")
    assert refused.value.param == "input_file_id"


@pytest.mark.parametrize(
    ("window", "seconds"), [("24h", 86_400), ("1h", 3600), ("30d", 2_592_000), ("720h", 2_592_000)]
)
def test_a_window_is_hours_or_days(window: str, seconds: int) -> None:
    assert window_seconds(window) == seconds


@pytest.mark.parametrize("window", ["", "0h", "24", "h", "31d", "721h", "-1h", "1.5h", "24H", " 24h", "9999999h", "٢h"])
def test_another_window_is_refused(window: str) -> None:
    body = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": window}
    with pytest.raises(ValueError, match="completion_window"):
        BatchRequest.model_validate(body)


def test_a_batch_that_is_not_there_is_told(world: World) -> None:
    for call in (world.store.get, world.store.cancel, world.store.pause, world.store.resume, world.store.retry_failed):
        with pytest.raises(BatchNotFound):
            call("batch_none")
    assert world.store.acquire("batch_none", "runner", LEASE_S) is None


def test_the_list_is_newest_first_page_by_page(world: World) -> None:
    made = []
    for _ in range(5):
        world.clock.now += 1
        made.append(world.create())
    made.reverse()
    first, more = world.store.newest(None, 3)
    assert ([b.id for b in first], more) == (made[:3], True)
    rest, more = world.store.newest(first[-1].id, 3)
    assert ([b.id for b in rest], more) == (made[3:], False)
    with pytest.raises(KeyError):
        world.store.newest("batch_none", 3)


# --- leases ---


def test_one_runner_at_a_time(world: World) -> None:
    batch = world.create()
    assert world.store.acquire(batch, "a", LEASE_S) == 1
    assert world.store.acquire(batch, "b", LEASE_S) is None
    assert world.store.acquire(batch, "a", LEASE_S) is None


def test_of_many_at_once_one_becomes_the_runner(world: World) -> None:
    batch = world.create()
    fences: list[int | None] = []
    threads = [
        threading.Thread(target=lambda n=n: fences.append(world.store.acquire(batch, f"r{n}", LEASE_S)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fences, key=lambda f: f is None) == [1] + [None] * 7


def test_a_lease_that_ran_out_goes_to_another_with_a_higher_fence(world: World) -> None:
    batch = world.create()
    first = world.acquire(batch)
    world.client.delete(batch_lease_key(batch))  # as its expiry does
    second = world.acquire(batch)
    assert second > first
    assert not world.store.renew(batch, first, LEASE_S)
    assert world.store.renew(batch, second, LEASE_S)


def test_a_lease_that_ran_out_can_be_renewed_while_nobody_took_it(world: World) -> None:
    batch = world.create()
    fence = world.acquire(batch)
    world.client.delete(batch_lease_key(batch))
    assert world.store.renew(batch, fence, LEASE_S)
    assert world.store.acquire(batch, "other", LEASE_S) is None
    assert 0 < world.client.pttl(batch_lease_key(batch)) <= LEASE_S * 1000


def test_a_released_batch_can_be_taken_at_once_and_its_old_runner_writes_no_more(world: World) -> None:
    batch, fence = world.running()
    world.store.release(batch, fence)
    with pytest.raises(LeaseLost):
        world.commit(batch, fence, world.part("output", 1))
    assert world.acquire(batch) > fence
    world.store.release(batch, fence)  # of a lease it has no longer
    assert world.store.acquire(batch, "third", LEASE_S) is None


def test_an_ended_batch_has_no_runner(world: World) -> None:
    batch = world.ended()
    assert world.store.acquire(batch, "runner", LEASE_S) is None
    assert world.client.exists(batch_lease_key(batch)) == 0


def test_every_write_with_an_old_fence_is_refused_and_changes_nothing(world: World) -> None:
    batch, old = world.running()
    world.client.delete(batch_lease_key(batch))
    world.acquire(batch)
    before = world.client.hgetall(batch_key(batch))
    part = world.part("output", 1)
    writes: list[Any] = [
        lambda: world.store.start(batch, old, 3, "tiny"),
        lambda: world.store.fail_validation(batch, old, []),
        lambda: world.commit(batch, old, part),
        lambda: world.store.finalize(batch, old),
        lambda: world.store.finish(batch, old, "completed"),
    ]
    for write in writes:
        with pytest.raises(LeaseLost):
            write()
    assert world.client.hgetall(batch_key(batch)) == before
    assert len(world.store.done_lines(batch)) == 0


def test_the_runner_of_a_batch_that_is_gone_has_lost_its_lease(world: World) -> None:
    batch, fence = world.running()
    world.client.delete(batch_key(batch))
    assert not world.store.renew(batch, fence, LEASE_S)
    with pytest.raises(LeaseLost):
        world.commit(batch, fence, world.part("output", 1))
    with pytest.raises(LeaseLost):
        world.store.finish(batch, fence, "completed")


# --- running ---


def test_a_batch_runs_from_start_to_end(world: World) -> None:
    batch, fence = world.running(3)
    assert world.store.get(batch).model == "tiny"
    assert world.commit(batch, fence, world.part("output", 1, 3), world.part("error", 2)) == "in_progress"
    assert world.store.finalize(batch, fence) == "finalizing"
    assert world.store.finish(batch, fence, "completed") == "completed"
    found = world.store.get(batch)
    assert (found.completed, found.failed, found.total, found.remaining) == (2, 1, 3, 0)
    assert set(found.times) == {"in_progress_at", "finalizing_at", "completed_at"}
    assert world.store.open_batches() == []


def test_a_bad_input_ends_a_batch_as_failed_with_its_errors(world: World) -> None:
    batch = world.create()
    errors = [{"code": "duplicate_custom_id", "line": 7, "message": "twice", "param": "custom_id"}]
    assert world.store.fail_validation(batch, world.acquire(batch), errors) == "failed"
    found = world.store.get(batch)
    assert (found.status, found.errors, found.total) == ("failed", errors, 0)
    assert "failed_at" in found.times
    with pytest.raises(BatchState, match="no failed line"):
        world.store.retry_failed(batch)


def test_a_started_batch_cannot_fail_its_validation(world: World) -> None:
    batch, fence = world.running()
    with pytest.raises(ValueError, match="in_progress"):
        world.store.fail_validation(batch, fence, [])
    assert world.store.get(batch).status == "in_progress"


def test_result_files_are_there_from_the_first_part_of_their_kind(world: World) -> None:
    batch, fence = world.running(4)
    assert world.store.get(batch).output_file_id is None
    world.commit(batch, fence, world.part("output", 1, 2))
    found = world.store.get(batch)
    assert found.output_file_id is not None
    assert found.error_file_id is None
    world.commit(batch, fence, world.part("output", 3, data=b"another\n"))
    assert world.store.get(batch).output_file_id == found.output_file_id
    file, chunks = world.files.content(found.output_file_id)
    data = b"".join(chunks)
    assert data == b"row\nrow\nanother\n"
    assert (file.purpose, file.size, file.filename) == ("batch_output", len(data), f"{batch}_output.jsonl")
    assert file == world.files.get(found.output_file_id)


def test_a_batch_that_only_failed_has_no_output_file(world: World) -> None:
    found = world.store.get(world.ended(completed=0, failed=3))
    assert (found.status, found.output_file_id, found.failed) == ("completed", None, 3)
    assert found.error_file_id is not None
    assert len(world.files.parts(found.error_file_id)) == 1


def test_the_same_parts_committed_twice_count_once(world: World) -> None:
    batch, fence = world.running()
    parts = (world.part("error", 1), world.part("output", 2, 3))
    world.commit(batch, fence, *parts, usage=Usage(input=5))
    world.commit(batch, fence, *parts, usage=Usage(input=5))
    found = world.store.get(batch)
    assert (found.completed, found.failed, found.usage.input) == (2, 1, 5)
    assert found.output_file_id is not None
    assert len(world.files.parts(found.output_file_id)) == 1


@pytest.mark.parametrize("again", [(2,), (3, 2), (3, 3)])
def test_a_line_never_has_two_rows(world: World, again: tuple[int, ...]) -> None:
    batch, fence = world.running()
    world.commit(batch, fence, world.part("output", 1, 2))
    for which in ("output", "error"):
        with pytest.raises(ValueError, match="doubled"):
            world.commit(batch, fence, world.part(which, *again))
    assert world.counts(batch) == (2, 0, 10)
    assert list(world.store.done_lines(batch)) == [1, 2]


def test_a_line_is_not_in_both_files_of_one_commit(world: World) -> None:
    batch, fence = world.running()
    with pytest.raises(ValueError, match="doubled"):
        world.commit(batch, fence, world.part("output", 1), world.part("error", 1))
    assert world.counts(batch) == (0, 0, 10)


def test_counts_never_pass_the_total(world: World) -> None:
    batch, fence = world.running(2)
    with pytest.raises(ValueError, match="beyond"):
        world.commit(batch, fence, world.part("output", 1, 2, 3))
    assert world.counts(batch) == (0, 0, 2)


def test_a_batch_does_not_end_before_each_line_has_a_row(world: World) -> None:
    batch, fence = world.running(2)
    world.commit(batch, fence, world.part("output", 1))
    for status in ("completed", "cancelled", "expired"):
        with pytest.raises(ValueError, match="no row"):
            world.store.finish(batch, fence, status)  # type: ignore[arg-type]
    assert world.store.get(batch).status == "in_progress"


def test_tokens_are_summed(world: World) -> None:
    batch, fence = world.running()
    world.commit(batch, fence, world.part("output", 1), usage=Usage(10, 5, 2, 1))
    world.commit(batch, fence, world.part("output", 2), usage=Usage(1, 1))
    assert world.store.get(batch).usage == Usage(11, 6, 2, 1)


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.dictionaries(st.integers(1, 5000), st.booleans(), min_size=1, max_size=40))
def test_the_lines_that_are_through_are_exactly_those_committed(world: World, rows: dict[int, bool]) -> None:
    batch, fence = world.running(len(rows))
    kinds = {"output": [n for n, ok in rows.items() if ok], "error": [n for n, ok in rows.items() if not ok]}
    parts = [Part(which, f"{batch}/{which}", numbers, 1) for which, numbers in kinds.items() if numbers]  # type: ignore[arg-type]
    world.commit(batch, fence, *parts)
    done = world.store.done_lines(batch)
    assert list(done) == sorted(rows)
    assert len(done) == len(rows)
    assert all((n in done) == (n in rows) for n in range(5002))
    assert list(Lines(world.client.get(batch_failed_key(batch)) or b"")) == sorted(kinds["error"])


# --- cancel, pause ---


@pytest.mark.parametrize("started", [False, True])
def test_a_cancelled_batch_ends_as_cancelled_whatever_its_runner_meant(world: World, started: bool) -> None:
    batch, fence = world.running(1) if started else (world.create(), 0)
    assert world.store.cancel(batch).status == "cancelling"
    fence = fence or world.acquire(batch)
    assert world.store.start(batch, fence, 1, "tiny") == "cancelling"
    assert world.commit(batch, fence, world.part("output", 1)) == "cancelling"
    assert world.store.finalize(batch, fence) == "cancelling"
    assert world.store.finish(batch, fence, "completed") == "cancelled"
    found = world.store.get(batch)
    assert (found.status, found.completed, found.total) == ("cancelled", 1, 1)
    assert {"cancelling_at", "cancelled_at"} <= set(found.times)
    assert "completed_at" not in found.times


def test_a_bad_input_of_a_batch_that_is_being_cancelled_ends_it_as_cancelled(world: World) -> None:
    batch = world.create()
    world.store.cancel(batch)
    assert world.store.fail_validation(batch, world.acquire(batch), []) == "cancelled"


def test_a_second_cancel_changes_nothing(world: World) -> None:
    batch, fence = world.running(0)
    first = world.store.cancel(batch)
    world.clock.now += 5
    assert world.store.cancel(batch) == first
    world.store.finish(batch, fence, "cancelled")
    ended = world.store.get(batch)
    assert world.store.cancel(batch) == ended


@pytest.mark.parametrize("status", ["completed", "expired"])
def test_an_ended_batch_cannot_be_cancelled(world: World, status: str) -> None:
    batch = world.ended(status=status)
    with pytest.raises(BatchState, match=status):
        world.store.cancel(batch)
    assert world.store.get(batch).status == status


def test_a_paused_batch_stays_in_progress_until_it_is_resumed(world: World) -> None:
    batch, _ = world.running()
    paused = world.store.pause(batch)
    assert (paused.status, paused.paused) == ("in_progress", True)
    assert world.store.pause(batch) == paused
    assert world.store.open_batches() == [paused]
    resumed = world.store.resume(batch)
    assert not resumed.paused
    assert world.store.resume(batch) == resumed


def test_a_batch_can_be_paused_before_it_starts(world: World) -> None:
    batch = world.create()
    world.store.pause(batch)
    assert world.store.start(batch, world.acquire(batch), 1, "tiny") == "in_progress"
    assert world.store.get(batch).paused


def test_a_cancel_ends_a_pause(world: World) -> None:
    batch, _ = world.running()
    world.store.pause(batch)
    assert not world.store.cancel(batch).paused
    with pytest.raises(BatchState, match="cancelling"):
        world.store.pause(batch)


def test_an_ended_batch_is_not_paused_or_resumed(world: World) -> None:
    batch = world.ended()
    for call in (world.store.pause, world.store.resume):
        with pytest.raises(BatchState, match="completed"):
            call(batch)
    assert not world.store.get(batch).paused


# --- retry ---


@pytest.mark.parametrize("status", ["completed", "expired"])
def test_failed_lines_are_run_again(world: World, status: str) -> None:
    batch = world.ended(completed=2, failed=2, status=status)
    before = world.store.get(batch)
    parts = [part["name"] for part in world.files.parts(before.error_file_id or "")]
    world.clock.now += 100
    found = world.store.retry_failed(batch)
    assert (found.status, found.completed, found.failed, found.total) == ("in_progress", 2, 0, 4)
    assert (found.error_file_id, found.output_file_id, found.retries) == (None, before.output_file_id, 1)
    assert found.expires_at == int(world.clock.now) + 86_400
    assert set(found.times) == {"in_progress_at"}
    assert list(world.store.done_lines(batch)) == [1, 2]
    with pytest.raises(FileNotFound):
        world.files.get(before.error_file_id or "")
    world.files.sweep()
    for name in parts:
        with pytest.raises(FileNotFoundError):
            world.files.storage.open(name)

    fence = world.acquire(batch)
    world.commit(batch, fence, world.part("output", 4), world.part("error", 3))
    world.store.finish(batch, fence, "completed")
    again = world.store.get(batch)
    assert (again.completed, again.failed, again.total) == (3, 1, 4)
    assert again.error_file_id not in (None, before.error_file_id)
    _, chunks = world.files.content(again.output_file_id or "")
    assert b"".join(chunks) == b"row\n" * 3


def test_there_is_nothing_to_retry_in_an_open_batch_or_without_a_failed_line(world: World) -> None:
    with pytest.raises(BatchState, match="in_progress"):
        world.store.retry_failed(world.running()[0])
    with pytest.raises(BatchState, match="no failed line"):
        world.store.retry_failed(world.ended(failed=0))


def test_a_retry_needs_the_input_file(world: World) -> None:
    batch = world.ended()
    file = world.store.get(batch).input_file_id
    world.files.delete(file)
    with pytest.raises(FileNotFound, match=file):
        world.store.retry_failed(batch)
    assert world.store.get(batch).status == "completed"


def test_a_retry_keeps_the_record_from_expiring(world: World) -> None:
    batch = world.ended()
    world.store.retry_failed(batch)
    assert [world.client.ttl(key(batch)) for key in (batch_key, batch_done_key)] == [-1, -1]
    output = world.store.get(batch).output_file_id or ""
    assert world.files.get(output).expires_at is None


def test_an_output_file_that_was_deleted_is_made_anew_by_a_retry(world: World) -> None:
    batch = world.ended()
    old = world.store.get(batch).output_file_id or ""
    world.files.delete(old)
    world.store.retry_failed(batch)
    world.commit(batch, world.acquire(batch), world.part("output", 3))
    new = world.store.get(batch).output_file_id or ""
    assert new != old
    assert world.files.get(new).size == len(b"row\n")


# --- files of batches ---


def test_files_of_an_open_batch_cannot_be_deleted(world: World) -> None:
    batch, fence = world.running(2)
    world.commit(batch, fence, world.part("output", 1), world.part("error", 2))
    found = world.store.get(batch)
    ids = (found.input_file_id, found.output_file_id or "", found.error_file_id or "")
    for file in ids:
        with pytest.raises(BatchState, match="has not ended"):
            world.files.delete(file)
    world.store.finish(batch, fence, "completed")
    for file in ids:
        world.files.delete(file)
    assert world.client.zcard(TRASH) == 0


def test_an_input_file_is_kept_beyond_its_time_while_a_batch_needs_it(world: World) -> None:
    batch, fence = world.running(0)
    world.clock.now += world.settings.file_ttl_s
    world.files.sweep()
    with world.files.open(world.store.get(batch).input_file_id) as stream:
        assert stream.read() == b"{}\n"
    world.store.finish(batch, fence, "completed")
    with pytest.raises(FileNotFound):
        world.files.open(world.store.get(batch).input_file_id)


def test_an_ended_batch_and_its_results_expire_together(world: World) -> None:
    batch = world.ended()
    found = world.store.get(batch)
    for key in (batch_key, batch_done_key, batch_failed_key):
        assert world.client.ttl(key(batch)) == world.settings.file_ttl_s
    for file in (found.output_file_id, found.error_file_id):
        assert world.files.get(file or "").expires_at == int(world.clock.now) + world.settings.file_ttl_s


def test_results_can_have_a_time_of_their_own(world: World) -> None:
    batch, fence = world.running(1, output_ttl_s=3600)
    world.commit(batch, fence, world.part("output", 1))
    output = world.store.get(batch).output_file_id or ""
    until = world.files.get(output).expires_at
    assert until == int(world.clock.now) + 3600
    world.clock.now += 1800
    world.store.finish(batch, fence, "completed")
    assert world.files.get(output).expires_at == until


def test_expired_batches_leave_the_list(world: World) -> None:
    kept, gone = world.create(), world.create()
    world.client.delete(batch_key(gone))  # as its expiry does
    assert [b.id for b in world.store.newest(None, 10)[0]] == [kept]
    assert world.store.sweep() == 1
    assert world.client.zrange(BATCHES, 0, -1) == [kept.encode()]
    assert world.client.smembers(OPEN_BATCHES) == {kept.encode()}
    assert world.store.sweep() == 0


# --- what the API shows ---


def test_a_batch_is_shown_in_the_shape_of_openais(world: World) -> None:
    batch, fence = world.running(3, metadata={"a": "b"})
    world.commit(batch, fence, world.part("output", 1), usage=Usage(7, 3, 2, 1))
    shown = world.store.get(batch).shown()
    ours = BatchObject.model_validate(shown)
    theirs = Batch.model_validate(shown)
    assert theirs.request_counts is not None
    assert (theirs.request_counts.total, theirs.request_counts.completed) == (3, 1)
    assert theirs.usage is not None
    assert (theirs.usage.total_tokens, theirs.usage.input_tokens_details.cached_tokens) == (10, 2)
    assert set(Batch.model_fields) <= set(BatchObject.model_fields)
    assert (ours.paused, theirs.metadata, theirs.errors) == (False, {"a": "b"}, None)


def test_a_batch_that_too_few_replicas_have_is_stored_and_not_accepted(
    client: redis.Redis, valkey: str, tmp_path: Path
) -> None:
    given = {"redis_url": valkey, "redis_wait_replicas": 1, "redis_timeout_s": 0.2}
    world = World(client, load(Settings, given), tmp_path)
    with pytest.raises(RedisUnavailable, match="only 0 of 1 replicas"):
        world.create(idempotency="key")
    (batch,) = world.client.zrange(BATCHES, 0, -1)
    with pytest.raises(RedisUnavailable, match=batch.decode()):
        world.store.create(
            world.store.get(batch.decode()).input_file_id, "/v1/chat/completions", "24h", idempotency="key"
        )
