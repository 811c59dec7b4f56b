"""Publisher and finaliser together, on a real server: what the engine says becomes log, channel and RQ's record."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis
from redis.client import Pipeline as Pipe
from redis.exceptions import ConnectionError
from rq.job import Job
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.worker import SimpleWorker

from shared.connection import connect
from shared.errors import DecodeFailed, GrammarDeadEnd, QueueTimeout
from shared.jobs import JobStore
from shared.names import SERIALIZER, events_key, held_key, job_key, queue_name
from shared.results import JobObject, TokenEvent
from shared.schemas import JobRequest
from shared.settings import Settings, load
from shared.stream import AppendCall
from tests.processes import eventually
from tests.proxy import RedisProxy
from worker import publisher
from worker.answer import CallDelta, Delta, ToolCall
from worker.backend import SamplingParams
from worker.finaliser import Finaliser
from worker.held import HeldJob, hold
from worker.publisher import Publisher
from worker.requests import Ended, HandedBack, Likely, Logprob, Paused, Progress, Request, Started, Stats, Token

QUEUE = queue_name("m", "normal")
STATS = Stats(3, 2, 1, 0.5, 0.1, 0.2, 0.1, 0)


class Pipeline:
    """A worker's threads from the engine's outbox to RQ's record, without an engine."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self.store = store
        self.settings = settings
        self.worker = SimpleWorker([QUEUE], name="w", connection=store.client, serializer=SERIALIZER)
        self.held: dict[str, HeldJob] = {}
        self.lost: list[str] = []
        self.done = threading.Semaphore(0)
        self.finaliser = Finaliser(self.worker, store, self._on_done)
        self.publisher = Publisher(store, self.held, self.finaliser, self.lost.append)
        self.finaliser.start()
        self.publisher.start()

    def _on_done(self, execution: str) -> None:
        self.held.pop(execution, None)
        self.done.release()

    def take(self, **fields: Any) -> Request:
        """Submit a job and pull it, as a worker would."""
        job_id = self.store.submit(JobRequest(prompt="x", **fields), "m").job_id
        (held,) = hold(self.store.pull("w", [QUEUE], 1), self.store.client, "w", self.settings)
        assert held.id == job_id
        self.held[held.execution.id] = held
        return Request(job_id, held.execution.id, (1, 2, 3), SamplingParams(seed=7), 10)

    def say(self, *events: Any, wait: int = 0) -> None:
        self.publisher.put(list(events))
        for _ in range(wait):
            assert self.done.acquire(timeout=10)

    def stop(self) -> None:
        self.publisher.stop()
        self.finaliser.stop()


@pytest.fixture
def pipeline(store: JobStore, settings: Settings) -> Iterator[Pipeline]:
    made = Pipeline(store, settings)
    yield made
    made.stop()


def ended(request: Request, **fields: Any) -> Ended:
    return Ended(request, **{"tokens": 2, "text": "Hi", "stats": STATS, "finish_reason": "stop", **fields})


def whole(request: Request) -> list[Any]:
    return [Started(request, False), Token(request, 0, 5, "H"), Token(request, 1, 6, "i"), ended(request)]


def test_tokens_and_end_reach_log_channel_and_record(pipeline: Pipeline, client: redis.Redis) -> None:
    request = pipeline.take()
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(events_key(request.id))
    pubsub.get_message(timeout=5)
    pipeline.say(*whole(request), wait=1)
    events = list(pipeline.store.stream.replay(request.id))
    assert [e.name for e in events] == ["started", "token", "token", "done"]
    assert [e.index for e in events] == [None, 0, 1, None]
    heard = [json.loads(pubsub.get_message(timeout=5)["data"]) for _ in range(4)]
    assert [h["event"] for h in heard] == [e.name for e in events]
    assert [h["data"] for h in heard] == [e.json() for e in events]
    pubsub.close()
    final = pipeline.store.view(request.id)
    assert final == events[-1].json()
    JobObject.model_validate(final)
    assert (final["text"], final["seed"], final["usage"]["cached_tokens"]) == ("Hi", 7, 1)
    job = Job.fetch(request.id, connection=client, serializer=SERIALIZER)
    assert job.get_status() == "finished" and job.return_value() == final
    assert request.id in FinishedJobRegistry(QUEUE, client).get_job_ids()
    assert StartedJobRegistry(QUEUE, client).get_job_ids() == []
    assert client.llen(held_key("w")) == 0


def test_a_pause_is_logged_before_the_job_goes_back_and_progress_is_only_published(
    pipeline: Pipeline, client: redis.Redis
) -> None:
    request = pipeline.take()
    with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(events_key(request.id))
        pubsub.get_message(timeout=5)
        early, late = Progress(request, 1, 3), Progress(request, 2, 3)
        said = [Started(request, False), early, late, Token(request, 0, 5, "H"), Paused(request, 1, "drained")]
        pipeline.say(*said, HandedBack(request), wait=1)
        heard = [json.loads(pubsub.get_message(timeout=5)["data"]) for _ in range(4)]
    logged = list(pipeline.store.stream.replay(request.id))
    assert [(e.name, str(e.id)) for e in logged] == [("started", "0-1"), ("token", "1-0"), ("paused", "1-1")]
    assert logged[-1].json() == {"tokens": 1, "reason": "drained"}
    assert [h["event"] for h in heard] == ["started", "progress", "token", "paused"]
    assert (heard[1]["id"], heard[1]["data"]) == ("0-0", {"done": 2, "total": 3})
    assert pipeline.store.fetch(request.id).rq_status == "queued"


def test_a_log_is_kept_as_long_as_the_record_however_late_that_is_written(
    pipeline: Pipeline, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pipeline.take()
    record = pipeline.finaliser._record_completed

    def late(outcomes: Any) -> None:
        client.expire(events_key(request.id), 100)  # what an outage has left of it
        record(outcomes)

    monkeypatch.setattr(pipeline.finaliser, "_record_completed", late)
    pipeline.say(*whole(request), wait=1)
    kept_s: Any = client.ttl(job_key(request.id))
    assert kept_s > 1000 and client.ttl(events_key(request.id)) >= kept_s


CALLS = (CallDelta(0, "call_1", "f"), CallDelta(0, arguments='{"a"'), CallDelta(0, arguments=": 1}"))
LIKELY = Logprob(Likely(b"\xf0", -0.5), (Likely(b"\xf0", -0.5), Likely(b"x", -1.5)))


def rich(request: Request) -> list[Token]:
    return [
        Token(request, 0, 5, "", Delta(reasoning="why ")),
        Token(request, 1, 6, "", Delta(reasoning="not")),
        Token(request, 2, 7, "Hi", Delta("Hi")),
        Token(request, 3, 8, "", Delta(tool_calls=CALLS[:2])),
        Token(request, 4, None, "", Delta(tool_calls=CALLS[2:])),
    ]


def test_events_carry_reasoning_and_calls_only_where_there_is_something(pipeline: Pipeline) -> None:
    request = pipeline.take()
    calls = (ToolCall("call_1", "f", '{"a": 1}'),)
    end = ended(request, tokens=5, reasoning="why not", tool_calls=calls, finish_reason="tool_calls")
    pipeline.say(*rich(request), end, wait=1)
    *tokens, done = [e.json() for e in pipeline.store.stream.replay(request.id)]
    for data in tokens:
        TokenEvent.model_validate(data)
    assert tokens[0] == {"index": 0, "text": "", "token": 5, "reasoning_content": "why "}
    assert tokens[2] == {"index": 2, "text": "Hi", "token": 7}
    assert tokens[3]["tool_calls"] == [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a"'}},
    ]
    assert tokens[4] == {
        "index": 4,
        "text": "",
        "token": None,
        "tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}],
    }
    JobObject.model_validate(done)
    assert (done["text"], done["reasoning_content"], done["finish_reason"]) == ("Hi", "why not", "tool_calls")
    assert done["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]


def test_a_running_job_shows_what_its_events_have_come_to(pipeline: Pipeline) -> None:
    request = pipeline.take()
    pipeline.say(Started(request, False), *rich(request)[:4])
    eventually(lambda: len(pipeline.store.stream.tokens(request.id)) == 4, "the tokens are written")
    view = pipeline.store.view(request.id)
    JobObject.model_validate(view)
    assert (view["status"], view["text"], view["reasoning_content"]) == ("running", "Hi", "why not")
    assert view["tool_calls"] == [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}]
    assert view["logprobs"] is None


def test_what_was_held_back_is_written_with_the_end_or_not_at_all(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pipeline.take()
    stream, commit = pipeline.store.stream, pipeline.store.commit
    before: list[list[int]] = []

    def flaky(ends: Any) -> Any:
        before.append([t["index"] for t in stream.tokens(request.id)])
        if len(before) == 1:
            raise ConnectionError("away")
        return commit(ends)

    monkeypatch.setattr(pipeline.store, "commit", flaky)
    pipeline.say(Token(request, 0, 5, "H"), Token(request, 1, None, "i"), ended(request), wait=1)
    assert before == [[0], [0]]
    assert [(str(e.id), e.name) for e in stream.replay(request.id)] == [
        ("1-0", "token"),
        ("2-0", "token"),
        ("2-1", "done"),
    ]
    assert stream.tokens(request.id)[1] == {"index": 1, "text": "i", "token": None}


def test_logprobs_are_part_of_events_and_result(pipeline: Pipeline) -> None:
    request = pipeline.take(logprobs=2)
    tokens = [Token(request, i, 5, "x", logprob=LIKELY) for i in range(2)]
    pipeline.say(*tokens, ended(request, logprobs=(LIKELY,) * 2), wait=1)
    first, _, done = [e.json() for e in pipeline.store.stream.replay(request.id)]
    TokenEvent.model_validate(first)
    assert first["logprobs"] == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xF0],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xF0]},
            {"token": "x", "logprob": -1.5, "bytes": [120]},
        ],
    }
    JobObject.model_validate(done)
    assert done["logprobs"] == [first["logprobs"]] * 2


def test_an_embedding_is_base64_and_has_no_text(pipeline: Pipeline) -> None:
    request = replace(pipeline.take(embed=True), embed=True)
    vector = np.array([0.5, -0.25], np.float32)
    stats = replace(STATS, generated_tokens=0)
    pipeline.say(Started(request, False), ended(request, tokens=0, text="", stats=stats, embedding=vector), wait=1)
    view = pipeline.store.view(request.id)
    JobObject.model_validate(view)
    assert np.frombuffer(base64.b64decode(view["embedding"]), "<f4").tolist() == [0.5, -0.25]
    assert (view["text"], view["seed"]) == (None, None)
    assert (view["usage"]["prompt_tokens"], view["usage"]["total_tokens"]) == (3, 3)


def test_many_ends_at_once_are_all_recorded(pipeline: Pipeline, client: redis.Redis) -> None:
    requests = [pipeline.take() for _ in range(20)]
    dependent = pipeline.store.submit(JobRequest(prompt="later", depends_on=requests[7].id), "m").job_id
    pipeline.say(*[e for r in requests for e in whole(r)], wait=20)
    records = pipeline.store.fetch_many([r.id for r in requests])
    assert all(r is not None and r.rq_status == "finished" for r in records)
    assert pipeline.store.fetch(dependent).rq_status == "queued"
    assert client.llen(held_key("w")) == 0


def test_a_failure_is_recorded_with_its_code_and_partial_text(pipeline: Pipeline, client: redis.Redis) -> None:
    request = pipeline.take(retries=3)
    error = GrammarDeadEnd("no way on")
    pipeline.say(Token(request, 0, 5, "H"), ended(request, tokens=1, text="H", finish_reason=None, error=error), wait=1)
    final = pipeline.store.view(request.id)
    assert (final["status"], final["error"]["code"], final["text"]) == ("failed", "grammar_dead_end", "H")
    assert pipeline.store.stream.last(request.id).name == "failed"  # type: ignore[union-attr]
    assert request.id in FailedJobRegistry(QUEUE, client).get_job_ids()
    assert 604_700 < client.ttl(f"rq:job:{request.id}") <= 604_800


def test_a_failure_that_may_pass_spends_a_retry_and_keeps_the_tokens(pipeline: Pipeline) -> None:
    request = pipeline.take(retries=1)
    failed = ended(request, tokens=1, text="H", finish_reason=None, error=DecodeFailed("a bad pass"))
    pipeline.say(Token(request, 0, 5, "H"), failed, wait=1)
    record = pipeline.store.fetch(request.id)
    assert (record.rq_status, record.retries_left, record.end) == ("queued", 0, None)
    assert [t["token"] for t in pipeline.store.stream.tokens(request.id)] == [5]
    (again,) = pipeline.store.pull("w", [QUEUE], 1)
    assert again.record.id == request.id and again.execution != request.execution


def test_without_retries_left_such_a_failure_is_final(pipeline: Pipeline) -> None:
    request = pipeline.take()
    pipeline.say(ended(request, finish_reason=None, error=DecodeFailed("a bad pass")), wait=1)
    assert pipeline.store.view(request.id)["error"]["code"] == "decode_failed"


def test_a_cancel_before_the_commit_wins(pipeline: Pipeline, client: redis.Redis) -> None:
    request = pipeline.take()
    assert pipeline.store.cancel(request.id)["status"] == "cancelled"
    pipeline.say(*whole(request), wait=1)
    final = pipeline.store.view(request.id)
    assert (final["status"], final["finish_reason"], final["text"]) == ("cancelled", "cancelled", "Hi")
    assert pipeline.store.fetch(request.id).rq_status == "canceled"
    assert request.id in CanceledJobRegistry(QUEUE, client).get_job_ids()


def test_a_job_with_another_owner_is_dropped_and_not_written(pipeline: Pipeline, client: redis.Redis) -> None:
    request = pipeline.take()
    client.hset(f"rq:job:{request.id}", "sl_exec", "another")
    pipeline.say(*whole(request))
    pipeline.publisher.stop()
    assert request.execution in pipeline.lost
    assert list(pipeline.store.stream.replay(request.id)) == []
    pipeline.publisher = Publisher(pipeline.store, pipeline.held, pipeline.finaliser, pipeline.lost.append)
    pipeline.publisher.start()


def test_jobs_handed_back_together_keep_their_order(pipeline: Pipeline, client: redis.Redis) -> None:
    requests = [pipeline.take() for _ in range(3)]
    behind = pipeline.store.submit(JobRequest(prompt="behind"), "m").job_id
    pipeline.say(*[HandedBack(r) for r in requests], wait=3)
    waiting = [i.decode() for i in client.lrange(f"rq:queue:{QUEUE}", 0, -1)]
    assert waiting == [*[r.id for r in requests], behind]
    assert StartedJobRegistry(QUEUE, client).get_job_ids() == []


def test_an_outage_delays_and_loses_nothing(
    pipeline: Pipeline, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pipeline.take()
    writer = pipeline.publisher._writer
    pipeline.say(Started(request, False), Token(request, 0, 5, "H"))
    eventually(lambda: len(pipeline.store.stream.tokens(request.id)) == 1, "the first token is written")
    # The reply to what was written is lost with the connection, and Redis stays away for two more tries.
    writer._connection.disconnect()
    append = pipeline.store.stream.append
    failures = [ConnectionError("gone"), ConnectionError("still gone")]

    def flaky(events: Any) -> Any:
        if failures:
            raise failures.pop()
        return append(events)

    monkeypatch.setattr(pipeline.store.stream, "append", flaky)
    pipeline.say(Token(request, 1, 6, "i"), ended(request), wait=1)
    assert not failures
    indexes = [e.index for e in pipeline.store.stream.replay(request.id) if e.index is not None]
    assert indexes == [0, 1]
    assert pipeline.store.view(request.id)["status"] == "completed"


def test_scripts_that_redis_forgot_are_loaded_again(pipeline: Pipeline, client: redis.Redis) -> None:
    request = pipeline.take()
    client.script_flush()
    pipeline.say(*whole(request), wait=1)
    assert [t["token"] for t in pipeline.store.stream.tokens(request.id)] == [5, 6]


def test_a_job_erased_after_its_commit_is_not_brought_back(pipeline: Pipeline, client: redis.Redis) -> None:
    request = pipeline.take()
    put = pipeline.finaliser.put

    def erase_first(*outcomes: Any) -> None:
        pipeline.store.erase(request.id)
        put(*outcomes)

    pipeline.finaliser.put = erase_first  # type: ignore[method-assign]
    pipeline.say(*whole(request), wait=1)
    assert [k for k in client.keys("*") if request.id.encode() in k] == []


def test_a_job_that_rq_cannot_read_is_failed_and_the_others_go_on(pipeline: Pipeline, client: redis.Redis) -> None:
    broken = pipeline.store.submit(JobRequest(prompt="x"), "m").job_id
    # Written by hand, so without what our own submit leaves in it.
    client.hset(f"rq:job:{broken}", mapping={"result_ttl": "0.5", "created_at": "yesterday"})
    client.hdel(f"rq:job:{broken}", "sl_print")
    fine = pipeline.store.submit(JobRequest(prompt="x"), "m").job_id
    (held,) = hold(pipeline.store.pull("w", [QUEUE], 2), client, "w", pipeline.settings)
    assert held.id == fine
    view = pipeline.store.view(broken)
    assert view["status"] == "failed" and "cannot be read" in view["error"]["message"]
    assert client.lrange(held_key("w"), 0, -1) == [fine.encode()]


def test_a_short_ttl_is_shown_as_it_is(pipeline: Pipeline, client: redis.Redis) -> None:
    request = pipeline.take(result_ttl_s=5)
    pipeline.say(*whole(request), wait=1)
    final = pipeline.store.view(request.id)
    assert final["expires_at"] - final["ended_at"] == pytest.approx(5)
    assert client.ttl(f"rq:job:{request.id}") <= 5


def test_a_job_that_never_ran_claims_nothing(pipeline: Pipeline) -> None:
    request = pipeline.take()
    refused = Stats(0, 0, 0, 0.5, 0, 0, 0, None)
    pipeline.say(Ended(request, 0, "", refused, None, QueueTimeout("too late")), wait=1)
    final = pipeline.store.view(request.id)
    assert final["status"] == "failed" and final["ended_at"] is not None
    assert [final[k] for k in ("started_at", "usage", "timings", "seed")] == [None] * 4


def test_what_a_stop_command_ended_shows_as_stopped(pipeline: Pipeline) -> None:
    request = pipeline.take()
    pipeline.held[request.execution].stopped = True
    pipeline.say(ended(request, finish_reason="cancelled"), wait=1)
    final = pipeline.store.view(request.id)
    assert (final["status"], final["detail"]) == ("cancelled", "stopped")
    assert pipeline.store.fetch(request.id).rq_status == "stopped"


def test_a_stop_that_came_too_late_changes_nothing(pipeline: Pipeline) -> None:
    request = pipeline.take()
    pipeline.held[request.execution].stopped = True
    pipeline.say(*whole(request), wait=1)
    assert pipeline.store.fetch(request.id).rq_status == "finished"


def test_jobs_that_waited_for_a_failed_one_end(pipeline: Pipeline) -> None:
    request = pipeline.take()
    dependent = pipeline.store.submit(JobRequest(prompt="later", depends_on=request.id), "m").job_id
    pipeline.say(ended(request, finish_reason=None, error=GrammarDeadEnd("no way on")), wait=1)
    view = pipeline.store.view(dependent)
    assert (view["status"], view["error"]["code"]) == ("cancelled", "dependency_failed")


def test_a_retry_whose_reply_was_lost_is_spent_once(
    pipeline: Pipeline, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pipeline.take(retries=2)
    lost = [ConnectionError("the reply")]
    execute = Pipe.execute

    def flaky(pipe: Pipe, raise_on_error: bool = True) -> Any:
        is_the_retry = any("sl_exec" in map(str, command[0]) and "HDEL" in command[0] for command in pipe.command_stack)
        answer = execute(pipe, raise_on_error)
        if is_the_retry and lost:
            raise lost.pop()
        return answer

    monkeypatch.setattr(Pipe, "execute", flaky)
    pipeline.say(ended(request, finish_reason=None, error=DecodeFailed("a bad pass")), wait=1)
    assert not lost
    assert pipeline.store.fetch(request.id).retries_left == 1
    assert client.lrange(f"rq:queue:{QUEUE}", 0, -1) == [request.id.encode()]


@pytest.fixture
def proxied(valkey: str, client: redis.Redis) -> Iterator[tuple[Pipeline, RedisProxy]]:
    """A pipeline whose way to Redis can be cut."""
    with RedisProxy(valkey) as proxy:
        settings = load(Settings, {"redis_url": proxy.url})
        through = connect(settings)
        made = Pipeline(JobStore(through, settings), settings)
        yield made, proxy
        made.stop()
        through.close()


def test_what_an_outage_held_back_is_written_in_order_and_in_slices(
    proxied: tuple[Pipeline, RedisProxy], store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, proxy = proxied
    monkeypatch.setattr(publisher, "EVENTS_AT_ONCE", 7)
    sizes: list[int] = []
    of = AppendCall.of
    monkeypatch.setattr(AppendCall, "of", lambda events: sizes.append(len(events)) or of(events))
    first, second = pipeline.take(), pipeline.take()
    pipeline.say(Started(first, False), Started(second, False), Token(first, 0, 5, "a"))
    eventually(lambda: len(store.stream.tokens(first.id)) == 1, "the first token is written")
    proxy.cut()
    for index in range(50):
        pipeline.say(Token(first, index + 1, 5, "a"), Token(second, index, 6, "b"))
    pipeline.say(ended(first, tokens=51), ended(second, tokens=50))
    proxy.heal()
    for _ in range(2):
        assert pipeline.done.acquire(timeout=30)
    for request, count in ((first, 51), (second, 50)):
        events = list(store.stream.replay(request.id))
        assert [e.name for e in events] == ["started", *["token"] * count, "done"]
        assert [e.index for e in events if e.index is not None] == list(range(count))
        assert store.fetch(request.id).rq_status == "finished"
    assert max(sizes) == 7


@pytest.mark.parametrize("word", [b'"status":"completed"', b"1-0", b"slotline:held:w"], ids=["end", "token", "record"])
def test_a_lost_reply_to_what_a_worker_writes_doubles_nothing(
    proxied: tuple[Pipeline, RedisProxy], store: JobStore, word: bytes
) -> None:
    pipeline, proxy = proxied
    request = pipeline.take()
    proxy.drop_next_reply_to(word)
    pipeline.say(*whole(request), wait=1)
    assert proxy.dropped == 1
    assert [e.name for e in store.stream.replay(request.id)] == ["started", "token", "token", "done"]
    assert store.fetch(request.id).rq_status == "finished"
    assert store.client.llen(held_key("w")) == 0
    assert store.client.hget(pipeline.worker.key, "successful_job_count") == b"1"


def test_what_a_full_redis_refuses_is_kept_until_there_is_room(
    pipeline: Pipeline, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    request = pipeline.take()
    client.config_set("maxmemory", 1)
    try:
        pipeline.say(*whole(request))
        eventually(lambda: "trying again" in caplog.text, "it was refused")
        assert pipeline.store.stream.last(request.id) is None
    finally:
        client.config_set("maxmemory", 0)
    assert pipeline.done.acquire(timeout=30)
    assert pipeline.store.view(request.id)["text"] == "Hi"
    assert pipeline.store.fetch(request.id).rq_status == "finished"


class Forgetful:
    """Takes a job's log back to how it was, as a server does that comes back without its last seconds."""

    def __init__(self, client: redis.Redis, job_id: str) -> None:
        self._client, self._key = client, events_key(job_id)

    def keep(self, events: int) -> None:
        client: Any = self._client
        entries = client.xrange(self._key)
        client.delete(self._key)
        for entry_id, fields in entries[:events]:
            client.xadd(self._key, fields, id=entry_id)


@pytest.fixture
def owning(store: JobStore, settings: Settings) -> Iterator[Pipeline]:
    """A pipeline whose worker says that it owns its jobs."""
    made = Pipeline(store, settings)
    made.publisher._owns = lambda held: True
    yield made
    made.stop()


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("then", ["a token", "the end"])
def test_a_log_that_lost_its_last_events_is_written_anew(
    owning: Pipeline, client: redis.Redis, kept: int, then: str
) -> None:
    request = owning.take()
    tokens = [Token(request, index, index + 5, "x") for index in range(6)]
    owning.say(Started(request, False), *tokens[:5])
    eventually(lambda: len(owning.store.stream.tokens(request.id)) == 5, "the tokens are written")
    Forgetful(client, request.id).keep(kept)
    if then == "a token":
        owning.say(tokens[5])
        eventually(lambda: len(owning.store.stream.tokens(request.id)) == 6, "the log is whole")
    tail = Token(request, 6 if then == "a token" else 5, None, "y")
    owning.say(tail, ended(request, tokens=tail.index + 1, text="x" * tail.index + "y"), wait=1)
    events = list(owning.store.stream.replay(request.id))
    assert [e.name for e in events] == ["started", *["token"] * (tail.index + 1), "done"]
    assert [e.index for e in events[1:-1]] == list(range(tail.index + 1))
    assert "".join(t["text"] for t in owning.store.stream.tokens(request.id)) == owning.store.view(request.id)["text"]
    assert owning.lost == []


def test_a_log_is_written_anew_although_its_job_says_nothing_more(owning: Pipeline, client: redis.Redis) -> None:
    request = owning.take()
    owning.say(Started(request, False), *(Token(request, index, index + 5, "x") for index in range(5)))
    eventually(lambda: len(owning.store.stream.tokens(request.id)) == 5, "the tokens are written")
    whole = client.xrange(events_key(request.id))
    Forgetful(client, request.id).keep(2)
    owning.publisher.say_again()
    eventually(lambda: client.xrange(events_key(request.id)) == whole, "the log is whole")
    owning.say(ended(request, tokens=5, text="xxxxx"), wait=1)


def test_a_job_whose_log_lacks_more_than_is_known_here_is_given_up(owning: Pipeline, client: redis.Redis) -> None:
    request = owning.take()
    earlier = replace(request, generated=(5, 6))
    owning.say(Started(earlier, True), Token(earlier, 2, 7, "x"))
    eventually(lambda: owning.lost == [request.execution], "it is given up")
    assert client.exists(events_key(request.id)) == 0


def test_an_end_is_not_withheld_for_a_log_that_cannot_be_mended(pipeline: Pipeline) -> None:
    request = pipeline.take()
    pipeline.say(ended(request, tokens=2, text="Hi"), wait=1)
    assert pipeline.store.view(request.id)["text"] == "Hi"


def test_a_job_that_is_ours_after_all_ends_well(owning: Pipeline, client: redis.Redis) -> None:
    request = owning.take()
    owning.say(Started(request, False), Token(request, 0, 5, "H"))
    eventually(lambda: len(owning.store.stream.tokens(request.id)) == 1, "the token is written")
    record = client.hgetall(f"rq:job:{request.id}")
    client.delete(f"rq:job:{request.id}", events_key(request.id))
    asked: list[str] = []

    def owns(held: HeldJob) -> bool:
        asked.append(held.id)
        client.hset(f"rq:job:{request.id}", mapping=record)
        return True

    owning.publisher._owns = owns
    owning.say(Token(request, 1, 6, "i"), ended(request), wait=1)
    assert asked and owning.lost == []
    assert [e.name for e in owning.store.stream.replay(request.id)] == ["started", "token", "token", "done"]
    assert owning.store.fetch(request.id).rq_status == "finished"
