"""The join of log and channel, with a log and a channel that the test controls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from shared.errors import JobNotFound
from shared.jobs import JobStore
from shared.names import job_key
from shared.records import JobRecord
from shared.schemas import JobRequest
from shared.stream import PROGRESS, QUEUED, START, UNLOGGED, Event, EventId, dumps
from webapi import follow
from webapi.follow import Follower
from webapi.subscription import Notice


def token(index: int) -> Event:
    return Event(EventId.of_token(index), "token", "{}")


def note(tokens: int, step: int, name: str = "resumed") -> Event:
    return Event(EventId(tokens, step), name, "{}")


class Log:
    """Stands for the store: a log that the test fills, and a record that is over or not."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.entries: list[Event] = []
        self.reads = 0
        self.stream = self
        self.broken = 0

    def replay(self, job_id: str, after: EventId) -> Iterator[Event]:
        self.reads += 1
        if self.broken:
            self.broken -= 1
            raise redis.ConnectionError("gone")
        yield from sorted((e for e in self.entries if e.id > after), key=lambda e: e.id)

    def last(self, job_id: str) -> Event | None:
        return max(self.entries, key=lambda e: e.id, default=None)

    def fetch(self, job_id: str) -> JobRecord:
        return self.record


class Channel:
    """Stands for a subscription and its inbox: gives what the test has put there, then is closed."""

    is_shut = False

    def __init__(self, items: list[Event | Notice]) -> None:
        self.items = items
        self.inbox = self

    def take(self) -> Event | Notice:
        return self.items.pop(0) if self.items else Notice.CLOSED

    def wait(self, timeout_s: float) -> list[Channel]:
        return [self]


@pytest.fixture
def record(store: JobStore) -> JobRecord:
    return store.fetch(store.submit(JobRequest(prompt="hi"), "tiny").job_id)


def events(follower: Follower) -> Iterator[Event | None]:
    """The events one by one, with None for silence."""
    for together in follower.events(60):
        yield from together or [None]


def run(log: Log, items: list[Event | Notice], after: EventId = START) -> list[str]:
    store: Any = log
    channel: Any = Channel(items)
    found = events(Follower(store, channel, log.record, after))
    return ["-" if event is None else str(event.id) for event in found]


def test_events_that_join_are_passed_on_without_reading_the_log(record: JobRecord) -> None:
    log = Log(record)
    items: list[Event | Notice] = [note(0, 1, "started"), token(0), token(1), note(2, 1, "done")]
    assert run(log, items) == ["0-1", "1-0", "2-0", "2-1"]
    assert log.reads == 1


def test_events_in_the_log_and_on_the_channel_come_once(record: JobRecord) -> None:
    log = Log(record)
    log.entries = [note(0, 1, "started"), token(0), token(1)]
    assert run(log, [token(0), token(1), token(2)]) == ["0-1", "1-0", "2-0", "3-0"]


def test_a_hole_sends_the_reader_to_the_log(record: JobRecord) -> None:
    log = Log(record)
    items: list[Event | Notice] = [token(0), token(3)]
    found = Follower(log, Channel(items), record, START).news()
    assert next(found) == token(0)
    log.entries = [token(0), token(1), token(2), token(3)]
    assert list(found) == [token(1), token(2), token(3)]


def test_a_gap_sends_the_reader_to_the_log(record: JobRecord) -> None:
    log = Log(record)
    log.entries = [token(0)]
    found = Follower(log, Channel([Notice.GAP]), record, START).news()
    assert next(found) == token(0)
    log.entries += [token(1), note(2, 1, "done")]
    assert list(found) == [token(1), note(2, 1, "done")]


def test_an_end_whose_log_has_expired_is_passed_on_after_what_stands_for_the_rest(record: JobRecord) -> None:
    assert run(Log(record), [note(7, 1, "done"), token(8)]) == ["7-0", "7-1"]


def test_nothing_follows_the_end(record: JobRecord) -> None:
    log = Log(record)
    log.entries = [token(0), note(1, 1, "failed"), note(1, 2, "resumed"), token(1)]
    assert run(log, [token(2)]) == ["1-0", "1-1"]


def test_a_reader_that_could_not_read_the_log_tries_again_and_misses_nothing(record: JobRecord) -> None:
    log = Log(record)
    log.entries = [token(0), token(1)]
    log.broken = 2
    items: list[Event | Notice] = [token(1), Notice.SILENCE, token(2)]
    assert run(log, items) == ["1-0", "2-0", "3-0"]


def test_a_stopping_server_ends_a_stream_without_an_end(record: JobRecord) -> None:
    assert run(Log(record), [token(0), Notice.CLOSED, token(1)]) == ["1-0"]


def test_a_record_that_is_gone_ends_the_stream_with_job_removed(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(record)
    there = log.fetch

    def fetch(job_id: str) -> JobRecord:
        raise JobNotFound(job_id)

    monkeypatch.setattr(log, "fetch", fetch)
    log.entries = [token(0)]
    follower = Follower(log, Channel([Notice.SILENCE, Notice.SILENCE]), record, START)
    # A Redis that came back without its last seconds may be told of the job again.
    assert list(follower.news()) == [token(0)] and follower.is_behind
    monkeypatch.setattr(log, "fetch", there)
    assert list(follower.news()) == [] and not follower.is_behind
    monkeypatch.setattr(log, "fetch", fetch)
    monkeypatch.setattr("webapi.follow.REWRITE_S", 0.0)
    found = list(Follower(log, Channel([]), record, START).news())
    assert found[0] == token(0)
    assert found[1] is not None and found[1].name == "failed"
    assert found[1].json()["error"]["code"] == "job_removed"
    assert len(found) == 2


def ended(store: JobStore, record: JobRecord, **fields: Any) -> JobRecord:
    store.client.hset(job_key(record.id), mapping={"status": "finished", **fields})
    return store.fetch(record.id)


def done(tokens: int, text: str) -> Event:
    return Event(EventId(tokens, 1), "done", dumps({"text": text, "usage": None}))


@pytest.mark.parametrize("after", [START, EventId.of_token(1)])
def test_a_log_that_has_lost_its_head_is_a_gap_with_the_text_and_then_the_end(
    store: JobStore, record: JobRecord, after: EventId
) -> None:
    log = Log(ended(store, record))
    log.entries = [token(5), token(6), done(7, "seven tokens")]
    gap, end = Follower(log, Channel([]), log.record, after).news()
    assert (gap.name, gap.id, gap.index) == ("gap", EventId(7, 0), 6)
    assert gap.json() == {"tokens": 7, "text": "seven tokens", "reasoning_content": None, "tool_calls": None}
    assert end == log.entries[-1]


def test_a_reader_that_has_all_tokens_gets_the_end_alone(store: JobStore, record: JobRecord) -> None:
    log = Log(ended(store, record))
    log.entries = [done(7, "seven tokens")]
    assert list(Follower(log, Channel([]), log.record, EventId.of_token(6)).news()) == log.entries


def test_a_running_job_has_time_to_write_its_log_anew(record: JobRecord) -> None:
    log = Log(record)
    log.entries = [token(0), token(3)]
    follower = Follower(log, Channel([Notice.SILENCE, Notice.SILENCE]), record, START)
    assert list(follower.news()) == [token(0)]
    assert follower.is_behind
    log.entries = [token(index) for index in range(4)]
    assert list(follower.news()) == [token(1), token(2), token(3)]
    assert not follower.is_behind


def test_what_a_running_job_does_not_write_again_is_a_gap_and_the_reader_goes_on(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "REWRITE_S", 0.0)
    log = Log(record)
    log.entries = [token(0), token(3)]
    first, gap, third, fourth = Follower(log, Channel([token(4), Notice.SILENCE]), record, START).news()
    assert (first, third, fourth) == (token(0), token(3), token(4))
    assert gap.json() == {"tokens": 3, "text": None, "reasoning_content": None, "tool_calls": None}


def test_a_token_that_came_too_early_and_that_the_log_lacks_is_waited_for(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(record)
    log.entries = [token(0)]
    follower = Follower(log, Channel([token(0), token(3), Notice.SILENCE]), record, START)
    assert list(follower.news()) == [token(0)]
    monkeypatch.setattr(follow, "REWRITE_S", 0.0)
    assert [event.name for event in follower.news()] == ["gap", "token"]


def test_what_has_no_place_is_passed_on_while_it_is_true(record: JobRecord) -> None:
    log = Log(record)
    log.entries = [note(0, 1, "started")]
    queued, progress = (Event(UNLOGGED, name, "{}") for name in (QUEUED, PROGRESS))
    items: list[Event | Notice] = [queued, progress, token(0), progress, note(1, 1, "paused"), progress, queued]
    items += [note(1, 2, "resumed"), queued, progress, token(1)]
    found = [event.name for event in Follower(log, Channel(items), record, START).news()]
    assert found == ["started", "progress", "token", "paused", "queued", "resumed", "progress", "token"]
