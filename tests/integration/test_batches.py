"""Batches as users of the `openai` package drive them: real processes, killed and stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import redis

from shared.names import JOBS_INDEX
from tests.integration.conftest import StartService, StartWeb, StartWorker
from tests.processes import eventually

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
#: Two milliseconds a tick, so that there is time to kill somebody in mid-run.
ECHO = {"model": "fake:echo:0.002", "name": "echo", "n_parallel": 8}
QUICK = {"batch_lease_s": 1, "batch_part_s": 0.2}


@pytest.fixture
def sdk(start_web: StartWeb) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{start_web().url}/v1", api_key="none", max_retries=0) as found:
        yield found


def line(number: int, **body: Any) -> dict[str, Any]:
    """A request to repeat its number, some longer than others."""
    text = f"number {number} " * (1 + number % 5)
    given = {"model": "echo", "messages": [{"role": "user", "content": text.strip()}], "temperature": 0} | body
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": given}


class Batch:
    """A batch made through the API."""

    def __init__(self, sdk: openai.OpenAI, lines: list[dict[str, Any]]) -> None:
        self._sdk = sdk
        data = "\n".join(map(json.dumps, lines)).encode()
        self.file = sdk.files.create(file=("input.jsonl", data), purpose="batch")
        self.id = sdk.batches.create(input_file_id=self.file.id, endpoint=CHAT, completion_window="24h").id

    @property
    def now(self) -> openai.types.Batch:
        return self._sdk.batches.retrieve(self.id)

    @property
    def counts(self) -> tuple[int, int, int]:
        counts = self.now.request_counts
        assert counts is not None
        return counts.completed, counts.failed, counts.total

    def until(self, condition: Callable[[openai.types.Batch], object], what: str, limit_s: float = 90) -> None:
        eventually(lambda: condition(self.now), f"batch {what}", limit_s)

    def until_done(self, count: int) -> None:
        """Wait for so many lines to have a row."""
        eventually(lambda: sum(self.counts[:2]) >= count, f"{count} lines have a row", 90)

    def until_status(self, status: str) -> None:
        self.until(lambda batch: batch.status == status, f"is {status}")

    def rows(self, which: str = "output") -> dict[str, dict[str, Any]]:
        """The rows of a result file by custom_id; fails where one comes twice."""
        file_id = getattr(self.now, f"{which}_file_id")
        if file_id is None:
            return {}
        rows = [json.loads(row) for row in self._sdk.files.content(file_id).text.splitlines()]
        found = {row["custom_id"]: row for row in rows}
        assert len(found) == len(rows), "a line has two rows"
        return found

    def answers(self) -> dict[str, str]:
        return {i: row["response"]["body"]["choices"][0]["message"]["content"] for i, row in self.rows().items()}


def expected(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {one["custom_id"]: one["body"]["messages"][0]["content"] for one in lines}


def test_the_whole_life_of_a_batch(
    sdk: openai.OpenAI, start_worker: StartWorker, start_service: StartService, client: redis.Redis
) -> None:
    start_worker(**ECHO)
    service = start_service("batches", **QUICK)
    lines = [line(n) for n in range(40)]
    lines[7] = line(7, temperature=99)
    lines[9] = line(9, messages=[{"role": "user", "content": "x " * 10_000}])
    batch = Batch(sdk, lines)
    batch.until_status("completed")
    assert batch.counts == (38, 2, 40)
    assert batch.answers() == {i: text for i, text in expected(lines).items() if i not in ("id-7", "id-9")}
    errors = {i: row["response"]["body"]["error"]["code"] for i, row in batch.rows("error").items()}
    assert errors == {"id-7": "invalid_request", "id-9": "context_length_exceeded"}
    eventually(lambda: client.zcard(JOBS_INDEX) == 0, "the jobs are gone")
    assert service.stop() == 0 and "Traceback" not in service.log()


def test_a_broken_input_is_told_as_a_failed_batch(sdk: openai.OpenAI, start_service: StartService) -> None:
    start_service("batches", **QUICK)
    batch = Batch(sdk, [line(1), line(1), line(2, stream=True)])
    batch.until_status("failed")
    errors = batch.now.errors
    assert errors is not None and errors.data is not None
    codes = [(error.code, error.line) for error in errors.data]
    # No worker has served `echo` yet.
    assert codes == [
        ("model_not_found", 1),
        ("model_not_found", 2),
        ("duplicate_custom_id", 2),
        ("stream_not_supported", 3),
    ]


def test_whoever_is_killed_every_line_has_one_row_and_the_right_one(
    sdk: openai.OpenAI, start_worker: StartWorker, start_service: StartService, client: redis.Redis
) -> None:
    first = start_worker(**ECHO, lease_s=1)
    service = start_service("batches", **QUICK)
    lines = [line(n) for n in range(300)]
    batch = Batch(sdk, lines)
    batch.until_done(20)
    service.kill()
    service = start_service("batches", **QUICK)
    batch.until_done(80)
    first.kill()
    start_worker(**ECHO, lease_s=1)
    batch.until_done(160)
    service.kill()
    start_service("batches", **QUICK)
    batch.until_status("completed")
    assert batch.counts == (300, 0, 300)
    assert batch.answers() == expected(lines)
    eventually(lambda: client.zcard(JOBS_INDEX) == 0, "the jobs are gone")


def test_two_workers_and_two_processes_of_batches_share_the_work(
    sdk: openai.OpenAI, start_worker: StartWorker, start_service: StartService
) -> None:
    for _ in range(2):
        start_worker(**ECHO)
        start_service("batches", **QUICK)
    inputs = [[line(n) for n in range(100 * k, 100 * k + 100)] for k in range(3)]
    batches = [Batch(sdk, lines) for lines in inputs]
    for batch, lines in zip(batches, inputs, strict=True):
        batch.until_status("completed")
        assert batch.answers() == expected(lines)


def test_a_stop_loses_nothing_and_the_next_one_goes_on_at_once(
    sdk: openai.OpenAI, start_worker: StartWorker, start_service: StartService
) -> None:
    start_worker(**ECHO)
    patient = {**QUICK, "batch_lease_s": 600}
    service = start_service("batches", **patient)
    lines = [line(n) for n in range(200)]
    batch = Batch(sdk, lines)
    batch.until_done(10)
    assert service.stop() == 0
    start_service("batches", **patient)
    batch.until_status("completed")
    assert batch.answers() == expected(lines)


def test_a_cancel_in_mid_run_leaves_every_line_one_row(
    sdk: openai.OpenAI, start_worker: StartWorker, start_service: StartService, client: redis.Redis
) -> None:
    worker = start_worker(**ECHO | {"model": "fake:count:0.01"})
    start_service("batches", **QUICK)
    batch = Batch(sdk, [line(n, max_tokens=5 if n < 5 else 5000) for n in range(25)])
    batch.until_done(5)
    sdk.batches.cancel(batch.id)
    batch.until_status("cancelled")
    assert batch.counts == (5, 20, 25) and len(batch.rows()) == 5
    assert {row["error"]["code"] for row in batch.rows("error").values()} == {"batch_cancelled"}
    assert sdk.batches.cancel(batch.id).status == "cancelled"
    eventually(lambda: worker.stats.active_slots == 0, "the slots are free")
    eventually(lambda: client.zcard(JOBS_INDEX) == 0, "the jobs are gone")
