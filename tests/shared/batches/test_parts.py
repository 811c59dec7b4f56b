from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.batches import parts
from shared.batches.feeding import Feed
from shared.batches.lines import Line
from shared.batches.parts import Results, put_manifest
from shared.batches.records import Usage
from shared.batches.rows import answered, not_run, refused
from shared.errors import ContextLengthExceeded, StorageUnavailable
from shared.http_status import STATUS
from tests.shared.batches.running import CHAT, Batches, line

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def request(number: int) -> Line:
    return Line(number - 1, number, f"id-{number}", CHAT, {})


# --- rows ---


def test_the_row_of_an_answer_counts_its_tokens() -> None:
    row = answered("b", request(4), {"usage": USAGE, "choices": []}, ["b-4-0"])
    assert (row.number, row.which, row.usage, row.job_ids) == (4, "output", Usage(7, 5, 3, 2), ("b-4-0",))
    assert json.loads(row.data)["response"] == {
        "status_code": 200,
        "request_id": "b-4",
        "body": {"usage": USAGE, "choices": []},
    }


def test_the_row_of_an_embedding_has_no_tokens_of_an_answer() -> None:
    row = answered("b", request(1), {"usage": {"prompt_tokens": 7, "total_tokens": 7}}, [])
    assert row.usage == Usage(7, 0, 0, 0)


@pytest.mark.parametrize("error", STATUS)
def test_the_row_of_a_refusal_has_the_status_and_body_of_the_endpoint(error: Any) -> None:
    refusal = error.__new__(error)
    Exception.__init__(refusal)
    refusal.message, refusal.param = "no", None
    row = refused("b", request(1), refusal)
    shown = json.loads(row.data)
    assert row.which == "error" and shown["error"] is None
    assert shown["response"]["status_code"] == STATUS[error]
    assert shown["response"]["body"] == {"error": refusal.to_dict()}


def test_the_row_of_a_line_that_was_not_run_has_no_response() -> None:
    shown = json.loads(not_run("b", request(1), "batch_expired").data)
    assert shown["response"] is None and shown["error"]["code"] == "batch_expired" and shown["custom_id"] == "id-1"


def test_a_row_is_one_line_of_ascii_whatever_it_holds() -> None:
    text = "a\nb\u2028c\x85d\U0001f600\x00"
    data = answered("b", request(1), {"text": text}, []).data
    assert data.isascii() and data.count(b"\n") == 1 and len(data.splitlines()) == 1
    assert json.loads(data)["response"]["body"]["text"] == text


def test_a_line_keeps_its_ids_however_often_it_is_run_and_shares_them_with_no_other() -> None:
    def shown(batch: str, number: int) -> str:
        return json.loads(answered(batch, request(number), {}, []).data)["id"]

    assert shown("b", 1) == shown("b", 1)
    assert len({shown("b", 1), shown("b", 2), shown("c", 1)}) == 3


# --- parts ---


class Writing:
    """A batch of ten lines, and results for it."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.id = batches.submit([line(n) for n in range(10)])
        self.feed = Feed(batches.tools.jobs, self.id)
        self.results = self.holder()

    def holder(self) -> Results:
        """Results as the next holder of the lease writes them."""
        self.batches.client.delete(f"slotline:batch:{self.id}:lease")
        fence = self.batches.store.acquire(self.id, "me", 60)
        assert fence is not None
        self.batches.store.start(self.id, fence, 10, "m")
        tools = self.batches.tools
        return Results(tools.batches, tools.files, tools.settings, self.feed, self.id, fence, clock=self.batches.clock)

    def parts(self, which: str = "output") -> list[tuple[str, int]]:
        file_id = getattr(self.batches.get(self.id), f"{which}_file_id")
        return [(part["name"], part["lines"]) for part in self.batches.files.parts(file_id)] if file_id else []


@pytest.fixture
def make(client: redis.Redis, valkey: str, tmp_path: Path) -> Callable[..., Writing]:
    return lambda **settings: Writing(Batches(client, valkey, tmp_path, **settings))


@pytest.fixture
def writing(make: Callable[..., Writing]) -> Writing:
    return make(batch_part_lines=4, batch_part_s=5)


def good(*numbers: int) -> list[Any]:
    return [answered("b", request(number), {"usage": USAGE}, [f"b-{number}-0"]) for number in numbers]


def test_rows_are_written_when_they_are_many(writing: Writing) -> None:
    writing.results.add(good(1, 2, 3))
    assert not writing.results.write() and not writing.results.is_full and writing.parts() == []
    writing.results.add(good(4, 5))
    assert writing.results.is_full and writing.results.write()
    assert [lines for _, lines in writing.parts()] == [4]
    assert not writing.results.is_written and not writing.results.is_full


def test_rows_are_written_when_the_oldest_has_waited(writing: Writing) -> None:
    writing.results.add(good(1))
    writing.batches.clock.now += 3
    writing.results.add(good(2))
    writing.batches.clock.now += 2
    assert writing.results.write() and [lines for _, lines in writing.parts()] == [2]
    writing.results.add(good(3))
    assert not writing.results.write()


def test_rows_are_written_when_they_are_large(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2 * len(good(1)[0].data))
    writing.results.add(good(1))
    assert not writing.results.write()
    writing.results.add(good(2))
    assert writing.results.is_full and writing.results.write() and writing.results.is_written


def test_answers_and_refusals_come_out_together_each_in_its_file(writing: Writing) -> None:
    refusal = refused("b", request(2), ContextLengthExceeded("too long"), ["b-2-0"])
    writing.results.add([*good(1), refusal, *good(3)])
    writing.results.write(now=True)
    assert [lines for _, lines in writing.parts()] == [2] and [lines for _, lines in writing.parts("error")] == [1]
    batch = writing.batches.get(writing.id)
    assert writing.batches.counts(writing.id) == (2, 1, 10) and batch.usage == Usage(14, 10, 6, 4)


def test_the_names_of_two_holders_never_meet(writing: Writing) -> None:
    writing.results.add(good(1))
    writing.results.write(now=True)
    writing.results = writing.holder()
    writing.results.add(good(2))
    writing.results.write(now=True)
    names = [name for name, _ in writing.parts()]
    assert len(set(names)) == 2 and all(name.startswith(f"batches/{writing.id}/") for name in names)


def test_rows_that_the_storage_refuses_are_kept_and_written_once(writing: Writing) -> None:
    writing.results.add(good(1, 2))
    writing.batches.storage.refuses = True
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            writing.results.write(now=True)
    assert writing.results.is_full and writing.batches.counts(writing.id) == (0, 0, 10)
    writing.batches.storage.refuses = False
    writing.results.add(good(3))
    writing.results.write(now=True)
    assert [lines for _, lines in writing.parts()] == [2, 1]


def test_jobs_are_marked_before_the_commit_and_discarded_after_it(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Any]] = []
    commit = writing.batches.store.commit_part
    monkeypatch.setattr(writing.feed, "mark", lambda ids: told.append(("mark", ids)))
    monkeypatch.setattr(writing.feed, "discard", lambda ids: told.append(("discard", list(ids))) or ids[1:])
    monkeypatch.setattr(writing.batches.store, "commit_part", lambda *a: told.append(("commit", None)) or commit(*a))
    writing.results.add(good(1, 2))
    writing.results.discard()
    writing.results.write(now=True)
    writing.results.discard()
    assert told == [("mark", ["b-1-0", "b-2-0"]), ("commit", None), ("discard", ["b-1-0", "b-2-0"])]
    assert writing.results.has_leftovers  # its worker has yet to let go of it
    writing.results.discard()
    assert told[-1] == ("discard", ["b-2-0"]) and not writing.results.has_leftovers


def test_the_manifest_lists_the_parts_in_their_order(writing: Writing) -> None:
    for number in (1, 2):
        writing.results.add(good(number))
        writing.results.write(now=True)
    batch = writing.batches.get(writing.id)
    put_manifest(writing.batches.files, batch, 100)
    manifest = writing.batches.manifest(writing.id)
    assert manifest["request_counts"] == {"total": 10, "completed": 2, "failed": 0}
    assert [(part["name"], part["lines"]) for part in manifest["output"]["parts"]] == writing.parts()
    assert manifest["error"] == {"file_id": None, "parts": []}
