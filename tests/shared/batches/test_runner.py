from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.batches import runner as runners
from shared.batches.runner import Runner
from shared.errors import ContextLengthExceeded, StorageUnavailable
from shared.registry import ModelCard
from tests.shared.batches.running import Batches, line, until_done
from tests.shared.world import MODEL, QUEUES

MakeBatches = Callable[..., Batches]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test ends the jobs, so that waiting for one would only take time."""
    monkeypatch.setattr(runners, "WAIT_S", 0)


@pytest.fixture
def make(client: redis.Redis, valkey: str, tmp_path: Path) -> Iterator[MakeBatches]:
    made: list[Batches] = []

    def make_batches(**settings: Any) -> Batches:
        made.append(Batches(client, valkey, tmp_path, **settings))
        return made[-1]

    yield make_batches
    for batches in made:
        batches.close()


@pytest.fixture
def batches(make: MakeBatches) -> Batches:
    return make()


def running(batches: Batches, lines: int = 5) -> tuple[str, Runner]:
    """A batch whose first jobs are out."""
    batch_id = batches.submit([line(n) for n in range(lines)])
    runner = batches.runner(batch_id)
    runner.step()
    runner.step()
    assert batches.get(batch_id).status == "in_progress" and batches.world.waiting(QUEUES[-1])
    return batch_id, runner


# --- the whole life ---


def test_every_line_is_run_and_has_its_answer(batches: Batches) -> None:
    batch_id = batches.submit([line(n) for n in range(5)])
    runner = batches.runner(batch_id)
    until_done(runner, batches.model.serve)
    batch = batches.get(batch_id)
    assert (batch.status, batches.counts(batch_id), batch.error_file_id) == ("completed", (5, 0, 5), None)
    assert batches.texts(batch_id) == {f"id-{n}": f"text {n}" for n in range(5)}
    assert (batch.usage.input, batch.usage.output, batch.usage.cached) == (15, 10, 5)


def test_a_row_has_the_shape_that_clients_know(batches: Batches) -> None:
    batch_id = batches.submit([line(7)])
    until_done(batches.runner(batch_id), batches.model.serve)
    (row,) = batches.rows(batch_id)
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert row["id"].startswith("batch_req_") and row["error"] is None
    assert list(row["response"]) == ["status_code", "request_id", "body"]
    assert (row["response"]["status_code"], row["response"]["request_id"]) == (200, f"{batch_id}-1")
    body = row["response"]["body"]
    assert (body["object"], body["model"], body["choices"][0]["finish_reason"]) == ("chat.completion", MODEL, "stop")


def test_nothing_of_its_jobs_is_left_when_it_has_ended(batches: Batches) -> None:
    batch_id = batches.submit([line(n) for n in range(3)])
    runner = batches.runner(batch_id)
    until_done(runner, batches.model.serve)
    runner.run()
    assert batches.left_in_redis(batch_id) == set()


def test_its_jobs_have_the_least_priority_and_a_parent(batches: Batches) -> None:
    batch_id, _ = running(batches, 1)
    (job_id,) = batches.world.waiting(QUEUES[-1])
    record = batches.world.store.fetch(job_id)
    assert (job_id, record.priority, record.parent) == (f"{batch_id}-1-0", "batch", f"{batch_id}-1")


def test_two_batches_with_the_same_ids_have_their_own_answers(batches: Batches) -> None:
    one = batches.submit([line(n) for n in range(3)])
    other_lines = [line(n, messages=[{"role": "user", "content": f"other {n}"}]) for n in range(3)]
    other = batches.submit(other_lines)
    first, second = batches.runner(one), batches.runner(other)
    for _ in range(2):
        first.step()
        second.step()
    batches.model.serve()
    until_done(first)
    until_done(second)
    assert batches.texts(one) == {f"id-{n}": f"text {n}" for n in range(3)}
    assert batches.texts(other) == {f"id-{n}": f"other {n}" for n in range(3)}


def test_completions_and_embeddings_are_run_too(batches: Batches) -> None:
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": ["one", "two"], "n": 2}}]
    batch_id = batches.submit(lines, "/v1/completions")
    until_done(batches.runner(batch_id), batches.model.serve)
    (row,) = batches.rows(batch_id)
    assert [choice["text"] for choice in row["response"]["body"]["choices"]] == ["one", "one", "two", "two"]
    assert len(batches.model.served) == 4


# --- the input ---


def test_an_input_with_broken_lines_fails_the_batch_and_runs_nothing(batches: Batches) -> None:
    batch_id = batches.submit(b"\n".join([json.dumps(line(1)).encode(), b"[]", json.dumps(line(1)).encode()]))
    until_done(batches.runner(batch_id))
    batch = batches.get(batch_id)
    assert batch.status == "failed" and batches.world.waiting(QUEUES[-1]) == []
    assert [(e["code"], e["line"]) for e in batch.errors] == [("invalid_request", 2), ("duplicate_custom_id", 3)]


def test_an_input_that_is_gone_fails_the_batch(batches: Batches) -> None:
    batch_id = batches.submit([line(1)])
    batches.storage.delete(f"files/{batches.get(batch_id).input_file_id}")
    until_done(batches.runner(batch_id))
    assert [e["code"] for e in batches.get(batch_id).errors] == ["file_not_found"]


def test_a_model_is_known_by_its_other_name_and_lines_of_two_fail_the_batch(batches: Batches) -> None:
    batches.registry.register_model(ModelCard("other", "", 100, 10, 100, True, 0, ""))
    good = batches.submit([line(1, model="alias"), line(2, model=MODEL)])
    until_done(batches.runner(good), batches.model.serve)
    assert batches.get(good).model == MODEL and batches.get(good).status == "completed"
    bad = batches.submit([line(1, model="alias"), line(2, model="other"), line(3, model="nobody")])
    until_done(batches.runner(bad))
    errors = batches.get(bad).errors
    assert [(e["code"], e["line"]) for e in errors] == [("model_mismatch", 2), ("model_not_found", 3)]


# --- lines that fail ---


def test_lines_that_cannot_be_served_are_rows_and_the_rest_run(batches: Batches) -> None:
    lines = [line(n) for n in range(10)]
    lines[2] = line(2, temperature=99)
    lines[5] = line(5, no_such_field=1)
    batch_id = batches.submit(lines)
    runner = batches.runner(batch_id)
    runner.step()
    runner.step()
    refused = ContextLengthExceeded("the prompt is too long").to_dict()
    batches.model.serve(1, "failed", refused)
    until_done(runner, batches.model.serve)
    assert batches.get(batch_id).status == "completed" and batches.counts(batch_id) == (7, 3, 10)
    errors = {row["custom_id"]: row for row in batches.rows(batch_id, "error")}
    assert set(errors) == {"id-0", "id-2", "id-5"}
    for row in errors.values():
        assert row["response"]["status_code"] == 400 and row["error"] is None
    assert errors["id-0"]["response"]["body"] == {"error": refused}
    assert errors["id-2"]["response"]["body"]["error"]["param"] == "temperature"
    assert set(batches.texts(batch_id)) == {f"id-{n}" for n in range(10)} - set(errors)


def test_where_all_fail_there_is_no_output_file(batches: Batches) -> None:
    batch_id = batches.submit([line(n, temperature=99) for n in range(3)])
    until_done(batches.runner(batch_id))
    batch = batches.get(batch_id)
    assert (batch.status, batch.output_file_id, batches.counts(batch_id)) == ("completed", None, (0, 3, 3))
    assert len(batches.rows(batch_id, "error")) == 3


def test_one_choice_that_fails_ends_the_others_of_its_line(batches: Batches) -> None:
    batch_id = batches.submit([line(1, n=3)])
    runner = batches.runner(batch_id)
    runner.step()
    runner.step()
    pulled = batches.model.pull(2)
    batches.model.end(pulled[0], "failed", {"message": "no", "code": "decode_failed"})
    until_done(runner)
    assert batches.model.end(pulled[1]) == "cancelled"
    assert batches.world.waiting(QUEUES[-1]) == []
    (row,) = batches.rows(batch_id, "error")
    assert row["response"]["status_code"] == 500 and batches.counts(batch_id) == (0, 1, 1)


def test_a_job_that_is_cancelled_by_hand_is_a_row(batches: Batches) -> None:
    batch_id, runner = running(batches, 2)
    batches.world.store.cancel(f"{batch_id}-1-0")
    until_done(runner, batches.model.serve)
    (row,) = batches.rows(batch_id, "error")
    assert row["response"]["body"]["error"]["code"] == "job_cancelled" and batches.counts(batch_id) == (1, 1, 2)


def test_a_job_that_vanishes_is_submitted_again_but_not_for_ever(batches: Batches) -> None:
    batch_id, runner = running(batches, 1)
    for _ in range(3):
        batches.world.store.erase(f"{batch_id}-1-0")
        batches.clock.now += 10
        runner.step()
        runner.step()
        assert batches.world.waiting(QUEUES[-1]) == [f"{batch_id}-1-0"]
    batches.world.store.erase(f"{batch_id}-1-0")
    batches.clock.now += 10
    until_done(runner)
    (row,) = batches.rows(batch_id, "error")
    assert row["response"]["status_code"] == 410


def test_an_id_that_belongs_to_somebody_else_is_a_row(batches: Batches) -> None:
    batch_id = batches.submit([line(1), line(2)])
    batches.world.submit(id=f"{batch_id}-1-0", prompt="mine")
    until_done(batches.runner(batch_id), batches.model.serve)
    (row,) = batches.rows(batch_id, "error")
    assert (row["custom_id"], row["response"]["status_code"]) == ("id-1", 409)


# --- gradually ---


def test_only_so_many_jobs_are_out_at_a_time(make: MakeBatches) -> None:
    batches = make(batch_window=4)
    batch_id, runner = running(batches, 30)
    deepest = 0

    def serve_two() -> None:
        nonlocal deepest
        deepest = max(deepest, len(batches.world.waiting(QUEUES[-1])))
        batches.model.serve(2)

    until_done(runner, serve_two)
    assert deepest == 4 and batches.counts(batch_id) == (30, 0, 30)


def test_without_a_limit_it_is_sixteen_or_four_for_each_slot(batches: Batches) -> None:
    running(batches, 50)
    assert len(batches.world.waiting(QUEUES[-1])) == 16


def test_a_full_queue_is_waited_for(batches: Batches) -> None:
    batches.registry.register_model(ModelCard(MODEL, "", 4096, 100, 4096, True, 2, ""))
    batch_id, runner = running(batches, 5)
    assert len(batches.world.waiting(QUEUES[-1])) == 2

    def serve_later() -> None:
        batches.model.serve()
        batches.clock.now += 2

    until_done(runner, serve_later)
    assert batches.counts(batch_id) == (5, 0, 5)


def test_results_can_be_read_meanwhile(make: MakeBatches) -> None:
    batches = make(batch_part_s=5)
    batch_id, runner = running(batches, 3)
    batches.model.serve(1)
    runner.step()
    assert batches.rows(batch_id) == []
    batches.clock.now += 5
    runner.step()
    assert list(batches.texts(batch_id)) == ["id-0"] and batches.counts(batch_id) == (1, 0, 3)
    until_done(runner, batches.model.serve)
    manifest = batches.manifest(batch_id)
    assert [part["lines"] for part in manifest["output"]["parts"]] == [1, 2]


def test_a_part_has_no_more_lines_than_it_may(make: MakeBatches) -> None:
    batches = make(batch_part_lines=4, batch_window=10)
    batch_id, runner = running(batches, 10)
    until_done(runner, batches.model.serve)
    runner.run()
    output = batches.get(batch_id).output_file_id
    assert [part["lines"] for part in batches.files.parts(output)] == [4, 4, 2]
    manifest = batches.manifest(batch_id)
    assert manifest["status"] == "completed" and manifest["output"]["parts"] == batches.files.parts(output)


# --- death, outage, handover ---


def test_whoever_takes_over_finds_the_jobs_and_runs_no_line_twice(make: MakeBatches) -> None:
    batches = make(batch_part_s=5, batch_window=4)
    batch_id, dead = running(batches, 12)
    batches.model.serve(2)
    dead.step()
    batches.clock.now += 5
    dead.step()
    assert batches.counts(batch_id) == (2, 0, 12)  # committed
    batches.model.serve(1)
    dead.step()  # has a row in memory alone
    batches.model.serve(1)  # ended, and not noticed
    runner = batches.runner(batch_id)
    until_done(runner, batches.model.serve)
    assert batches.texts(batch_id) == {f"id-{n}": f"text {n}" for n in range(12)}
    assert len(batches.model.served) == len(set(batches.model.served)) == 12
    batches.clock.now += 5
    assert dead.step() and batches.counts(batch_id) == (12, 0, 12)


def test_a_death_between_commit_and_discard_leaves_nothing_behind(
    make: MakeBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = make(batch_part_s=5)
    batch_id, dead = running(batches, 4)
    batches.model.serve(2)
    batches.clock.now += 5
    with monkeypatch.context() as patch:
        patch.setattr("shared.batches.feeding.Feed.discard", lambda self, ids: list(ids))
        until(lambda: batches.counts(batch_id)[0] == 2, dead, batches)
    runner = batches.runner(batch_id)
    until_done(runner, batches.model.serve)
    runner.run()
    assert batches.left_in_redis(batch_id) == set() and len(batches.model.served) == 4


def test_a_death_between_mark_and_commit_loses_nothing(make: MakeBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make(batch_part_s=5)
    batch_id, dead = running(batches, 3)
    batches.model.serve(2)

    def die(*args: object) -> None:
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(batches.store, "commit_part", die)
        with pytest.raises(ConnectionResetError):
            until(lambda: False, dead, batches)
    runner = batches.runner(batch_id)
    until_done(runner, batches.model.serve)
    assert len(batches.texts(batch_id)) == 3 and len(batches.model.served) == 3


def until(condition: Callable[[], bool], runner: Runner, batches: Batches) -> None:
    for _ in range(20):
        batches.clock.now += 5
        runner.step()
        if condition():
            return


def test_a_commit_whose_answer_is_lost_is_not_made_twice(make: MakeBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make(batch_part_s=5)
    batch_id, runner = running(batches, 2)
    batches.model.serve()
    commit = batches.store.commit_part

    def lose_answer(*args: Any) -> None:
        commit(*args)
        monkeypatch.setattr(batches.store, "commit_part", commit)
        raise redis.exceptions.ConnectionError("lost")

    monkeypatch.setattr(batches.store, "commit_part", lose_answer)
    with pytest.raises(redis.exceptions.ConnectionError):
        until_done(runner)
    until_done(runner)
    assert batches.counts(batch_id) == (2, 0, 2) and len(batches.texts(batch_id)) == 2
    batches.now.now += 2 * 86_400
    batches.files.sweep()
    assert len(batches.texts(batch_id)) == 2


def test_a_storage_that_refuses_is_waited_for_with_what_there_is(make: MakeBatches) -> None:
    batches = make(batch_part_lines=5, batch_window=3)
    batch_id, runner = running(batches, 20)
    batches.storage.refuses = True
    refused = 0
    for _ in range(20):
        batches.model.serve()
        try:
            runner.step()
        except StorageUnavailable:
            refused += 1
    assert refused > 5 and len(batches.model.served) <= 5 + 3  # no more than a part and what was out
    batches.storage.refuses = False
    until_done(runner, batches.model.serve)
    assert len(batches.texts(batch_id)) == 20 and len(batches.model.served) == 20


def test_an_outage_is_waited_out(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "FIRST_BACKOFF_S", 0.0)
    batch_id, runner = running(batches, 3)
    batches.model.serve()
    outages = iter([redis.exceptions.ConnectionError("no Redis"), StorageUnavailable("no disk"), OSError("no network")])
    commit = batches.store.commit_part

    def commit_later(*args: Any) -> Any:
        for outage in outages:
            raise outage
        return commit(*args)

    monkeypatch.setattr(batches.store, "commit_part", commit_later)
    runner.run()
    assert batches.get(batch_id).status == "completed" and len(batches.texts(batch_id)) == 3
    assert [text in caplog.text for text in ("no Redis", "no disk", "no network")] == [True] * 3


def test_a_lease_that_is_known_to_be_lost_ends_the_runner(batches: Batches) -> None:
    batch_id, runner = running(batches, 3)
    batches.model.serve()
    runner._lease.is_lost = True
    runner.run()
    assert batches.counts(batch_id) == (0, 0, 3)


def test_a_lost_lease_ends_the_runner_and_nothing_more_is_written(batches: Batches) -> None:
    batch_id, slow = running(batches, 3)
    batches.model.serve()
    batches.runner(batch_id)
    slow.run()
    assert batches.counts(batch_id) == (0, 0, 3) and batches.rows(batch_id) == []


def test_a_lease_that_may_have_run_out_starts_nothing(batches: Batches) -> None:
    batch_id = batches.submit([line(1)])
    runner = batches.runner(batch_id)
    runner.step()
    runner._lease.until = -1.0
    runner.step()
    assert batches.world.waiting(QUEUES[-1]) == []


def test_stopping_writes_what_there_is_and_leaves_the_jobs(batches: Batches) -> None:
    batch_id, runner = running(batches, 4)
    batches.model.serve(2)
    runner.stop()
    runner.run()
    assert batches.counts(batch_id) == (2, 0, 4) and len(batches.world.waiting(QUEUES[-1])) == 2
    until_done(batches.runner(batch_id), batches.model.serve)
    assert len(batches.texts(batch_id)) == 4 and len(batches.model.served) == 4


def test_a_runner_that_is_stopped_while_it_reads_the_input_leaves_it(batches: Batches) -> None:
    batch_id = batches.submit([line(n) for n in range(3)])
    runner = batches.runner(batch_id)
    opened = batches.files.open

    def stop_and_open(file_id: str) -> Any:
        runner.stop()
        return opened(file_id)

    batches.files.open = stop_and_open  # type: ignore[method-assign]
    runner.run()
    assert batches.get(batch_id).status == "validating"


# --- cancel, expiry, pause, retry ---


def errors_of(batches: Batches, batch_id: str) -> dict[str, str]:
    rows = batches.rows(batch_id, "error")
    found = {row["custom_id"]: (row["error"] or row["response"]["body"]["error"])["code"] for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_cancel_in_mid_run_gives_every_line_one_row(make: MakeBatches) -> None:
    batches = make(batch_window=10)
    batch_id, runner = running(batches, 25)
    batches.model.serve(5)
    running_now = batches.model.pull(3)
    batches.store.cancel(batch_id)
    batches.clock.now += 2
    until_done(runner)
    assert [batches.model.end(one) for one in running_now] == ["cancelled"] * 3
    batch = batches.get(batch_id)
    assert batch.status == "cancelled" and batches.counts(batch_id) == (5, 20, 25)
    errors = errors_of(batches, batch_id)
    assert set(errors.values()) == {"batch_cancelled"}
    assert set(batches.texts(batch_id)) | set(errors) == {f"id-{n}" for n in range(25)}
    (row, *_) = batches.rows(batch_id, "error")
    assert row["response"] is None
    assert batches.world.waiting(QUEUES[-1]) == [] and batches.store.cancel(batch_id).status == "cancelled"


def test_a_cancel_after_the_last_line_keeps_every_answer(batches: Batches) -> None:
    batch_id, runner = running(batches, 3)
    batches.model.serve()
    batches.store.cancel(batch_id)
    batches.clock.now += 2
    until_done(runner)
    assert batches.get(batch_id).status == "cancelled" and batches.counts(batch_id) == (3, 0, 3)
    assert len(batches.texts(batch_id)) == 3


def test_a_cancel_that_comes_while_the_end_is_written_is_kept_to(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id, runner = running(batches, 2)
    batches.model.serve()
    finalize = batches.store.finalize

    def cancel_first(*args: Any) -> Any:
        batches.store.cancel(batch_id)
        return finalize(*args)

    monkeypatch.setattr(batches.store, "finalize", cancel_first)
    until_done(runner)
    assert batches.get(batch_id).status == "cancelled" and batches.counts(batch_id) == (2, 0, 2)


def test_a_cancel_before_the_input_was_read_gives_every_line_a_row_too(batches: Batches) -> None:
    batch_id = batches.submit([line(n) for n in range(3)])
    batches.store.cancel(batch_id)
    until_done(batches.runner(batch_id))
    assert batches.get(batch_id).status == "cancelled" and batches.counts(batch_id) == (0, 3, 3)
    assert batches.world.waiting(QUEUES[-1]) == [] and not batches.model.served


def test_a_cancel_whose_runner_died_ends_the_jobs_it_left(make: MakeBatches) -> None:
    batches = make(batch_window=6)
    batch_id, _dead = running(batches, 100)
    batches.model.serve(2)
    (held,) = batches.model.pull(1)
    batches.store.cancel(batch_id)
    until_done(batches.runner(batch_id))
    assert batches.counts(batch_id) == (2, 98, 100) and set(batches.texts(batch_id)) == {"id-0", "id-1"}
    assert batches.world.waiting(QUEUES[-1]) == [] and batches.model.end(held) == "cancelled"


def test_what_has_not_run_when_the_window_closes_has_expired(make: MakeBatches) -> None:
    batches = make(batch_window=4)
    batch_id, runner = running(batches, 10)
    batches.model.serve(2)
    batches.now.now += 24 * 3600
    until_done(runner)
    assert batches.get(batch_id).status == "expired" and batches.counts(batch_id) == (2, 8, 10)
    assert set(errors_of(batches, batch_id).values()) == {"batch_expired"}


def test_a_pause_takes_back_what_waits_and_a_resume_goes_on(make: MakeBatches) -> None:
    batches = make(batch_window=6)
    batch_id, runner = running(batches, 12)
    (running_now,) = batches.model.pull(1)
    batches.store.pause(batch_id)
    batches.clock.now += 2
    assert runner.step() is False
    assert batches.world.waiting(QUEUES[-1]) == []
    batches.model.end(running_now)
    until_done(runner)
    assert batches.counts(batch_id) == (1, 0, 12) and batches.get(batch_id).status == "in_progress"
    batches.store.resume(batch_id)
    until_done(batches.runner(batch_id), batches.model.serve)
    assert len(batches.texts(batch_id)) == 12 and len(batches.model.served) == 12


def test_a_resume_that_comes_soon_goes_on_in_the_same_runner(make: MakeBatches) -> None:
    batches = make(batch_window=6)
    batch_id, runner = running(batches, 12)
    batches.model.pull(1)
    batches.store.pause(batch_id)
    batches.clock.now += 2
    runner.step()
    batches.store.resume(batch_id)
    batches.clock.now += 2
    runner.step()
    assert len(batches.world.waiting(QUEUES[-1])) == 5


def test_failed_lines_are_run_again_and_the_others_are_not(batches: Batches) -> None:
    batch_id, runner = running(batches, 6)
    batches.model.serve(2, "failed", {"message": "no", "code": "decode_failed"})
    until_done(runner, batches.model.serve)
    runner.run()
    assert batches.counts(batch_id) == (4, 2, 6)
    batches.store.retry_failed(batch_id)
    again = batches.runner(batch_id)
    until_done(again, batches.model.serve)
    again.run()
    assert batches.get(batch_id).status == "completed" and batches.counts(batch_id) == (6, 0, 6)
    assert batches.texts(batch_id) == {f"id-{n}": f"text {n}" for n in range(6)}
    assert len(batches.model.served) == 8 and batches.left_in_redis(batch_id) == set()


def test_counts_never_fall_and_never_pass_the_total(make: MakeBatches) -> None:
    batches = make(batch_part_lines=2, batch_window=3)
    lines = [line(n, **({"temperature": 99} if n % 3 == 0 else {})) for n in range(10)]
    batch_id = batches.submit(lines)
    runner = batches.runner(batch_id)
    seen = [(0, 0)]

    def look() -> None:
        batches.model.serve()
        completed, failed, total = batches.counts(batch_id)
        assert completed >= seen[-1][0] and failed >= seen[-1][1] and completed + failed <= total
        seen.append((completed, failed))

    until_done(runner, look)
    assert batches.counts(batch_id) == (6, 4, 10) and len(set(seen)) > 3
