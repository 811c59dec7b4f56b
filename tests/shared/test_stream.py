from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import stream
from shared.names import events_key
from shared.stream import START, UNLOGGED, Append, Event, EventId, TokenStream, dumps, token_data
from tests.shared.world import World

# --- event ids ---

ids = st.builds(EventId, st.integers(0, 2**40), st.integers(0, 2**20))


@given(ids)
def test_an_id_is_read_as_it_is_written(event_id: EventId) -> None:
    assert EventId.parse(str(event_id)) == event_id


@given(st.integers(-1, 2**40))
def test_tokens_are_ordered_by_index_and_other_events_lie_between_them(index: int) -> None:
    this, following = EventId.of_token(index), EventId.of_token(index + 1)
    between = EventId(this.tokens, 1)
    assert this < between < EventId(this.tokens, 2) < following
    assert Event(following, "token", "{}").index == index + 1
    assert Event(between, "done", "{}").index is None


def test_the_place_before_the_first_token_is_the_start() -> None:
    assert EventId.of_token(-1) == START
    assert str(EventId.of_token(0)) == "1-0"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(given=st.sets(st.builds(EventId, st.integers(0, 30), st.integers(0, 5)), min_size=1))
def test_the_order_of_ids_is_the_order_in_redis(client: redis.Redis, given: set[EventId]) -> None:
    ordered = sorted(given - {START})
    client.delete("slotline:events:j")
    for event_id in ordered:
        client.xadd("slotline:events:j", {"event": "token", "data": "{}"}, id=str(event_id))
    reader = TokenStream(client)
    assert [event.id for event in reader.replay("j")] == ordered
    for at in given:
        assert [event.id for event in reader.replay("j", after=at)] == [i for i in ordered if i > at]


@pytest.mark.parametrize("text", ["", "5", "a-b", "5-*", "-", "1-2-3"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        EventId.parse(text)


# --- replay ---


def log(world: World, n: int) -> str:
    """A running job with n tokens in its log."""
    pulled = world.take()
    world.say(pulled, *(f"t{i} " for i in range(n)))
    return pulled.record.id


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 6, 7])
def test_a_log_is_read_whole_whatever_its_length_in_pages(
    n: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PAGE", 3)
    job_id = log(world, n)
    assert [event.index for event in world.store.stream.replay(job_id)] == list(range(n))
    for after in range(-1, n):
        rest = world.store.stream.replay(job_id, after=EventId.of_token(after))
        assert [event.index for event in rest] == list(range(after + 1, n))


def test_a_log_longer_than_a_real_page_is_read_whole(world: World) -> None:
    n = 2 * stream.PAGE + 1
    job_id = log(world, n)
    assert [t["index"] for t in world.store.stream.tokens(job_id)] == list(range(n))


def test_what_is_appended_while_a_log_is_read_is_read_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PAGE", 3)
    pulled = world.take()
    world.say(pulled, *"abc")
    reading = world.store.stream.replay(pulled.record.id)
    seen = [next(reading).index]
    world.say(pulled, *"de", start=3)
    assert seen + [event.index for event in reading] == [0, 1, 2, 3, 4]


def test_a_reader_beyond_the_end_gets_nothing(world: World) -> None:
    job_id = log(world, 2)
    assert list(world.store.stream.replay(job_id, after=EventId(99, 0))) == []


def test_a_job_without_a_log_has_no_events(world: World) -> None:
    assert list(world.store.stream.replay("nobody")) == []
    assert world.store.stream.last("nobody") is None
    assert world.store.stream.tokens("nobody") == []


def test_the_last_event_is_the_newest_of_any_kind(world: World) -> None:
    pulled = world.take()
    world.say(pulled, "a")
    last = world.store.stream.last(pulled.record.id)
    assert last is not None
    assert (last.name, last.index, last.is_terminal) == ("token", 0, False)
    world.store.stream.append([Append(pulled.record.id, pulled.execution, "1-*", "resumed", "{}")])
    last = world.store.stream.last(pulled.record.id)
    assert last is not None
    assert (last.name, str(last.id), last.index) == ("resumed", "1-1", None)


def test_an_event_without_a_place_is_published_and_not_logged_and_only_by_the_owner(
    world: World, client: redis.Redis
) -> None:
    pulled = world.take()
    world.say(pulled, "a")
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(events_key(pulled.record.id))
        channel.get_message(timeout=5)
        for execution in ("another", pulled.execution):
            data = dumps({"by": execution})
            refused = world.store.stream.append([Append(pulled.record.id, execution, "", "progress", data)])
            assert refused == ([] if execution == pulled.execution else ["another"])
        event = Event.from_message(channel.get_message(timeout=5)["data"])
        assert channel.get_message(timeout=0.1) is None
    assert (event.name, event.id, event.index) == ("progress", UNLOGGED, None)
    assert event.json() == {"by": pulled.execution}
    assert world.events(pulled.record.id) == ["token"]


def test_tokens_leaves_other_events_out(world: World) -> None:
    pulled = world.take()
    world.store.stream.append([Append(pulled.record.id, pulled.execution, "0-*", "started", "{}")])
    world.say(pulled, "a", "b")
    assert [t["text"] for t in world.store.stream.tokens(pulled.record.id)] == ["a", "b"]
    assert world.events(pulled.record.id) == ["started", "token", "token"]


@pytest.mark.parametrize(
    ("name", "over"), [("done", True), ("failed", True), ("token", False), ("started", False), ("error", False)]
)
def test_only_done_and_failed_are_the_last_of_a_stream(name: str, over: bool) -> None:
    assert Event(EventId(0, 1), name, "{}").is_terminal is over


# --- append through a pipeline ---


# --- the text itself ---

#: Lone surrogates too; a pair of them is one character in JSON, so no text of ours.
ANY_TEXT = st.text(st.characters()).filter(lambda text: json.loads(dumps(text)) == text)

NASTY = [
    "\r\n", "\n\n", "\r", "\u2028", "\u2029", "\x85", "\0", "\x1f", "😀", "é", "e\u0301", "\ud83d", "\ude00x", "\ufffd",
    '"', "\\", "\\n", "</script>", "data: x\n\n", "{}", "", " ", "\x7f", "\u202e",
]  # fmt: skip


def published(world: World, texts: list[str]) -> tuple[list[Event], list[Event]]:
    """What the log and what the channel say of the same tokens."""
    pulled = world.take()
    with world.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"slotline:events:{pulled.record.id}")
        channel.get_message(timeout=5)
        world.say(pulled, *texts)
        heard: list[Event] = []
        while len(heard) < len(texts):
            message = channel.get_message(timeout=5)
            heard += [Event.from_message(message["data"])] if message else []
    return list(world.store.stream.replay(pulled.record.id)), heard


def check_texts(world: World, texts: list[str]) -> None:
    logged, heard = published(world, texts)
    assert heard == logged
    assert [event.json()["text"] for event in logged] == texts
    for event in logged:
        assert event.data.isascii()
        assert len(event.data.splitlines()) == 1
        assert b"\\u2028" in dumps("\u2028").encode()


def test_every_text_survives_log_and_channel_byte_for_byte(world: World) -> None:
    check_texts(world, NASTY)
    check_texts(world, [" ".join(NASTY)])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=5))
def test_any_text_survives_log_and_channel(world: World, texts: list[str]) -> None:
    world.client.flushall()
    check_texts(world, texts)


def test_the_text_of_a_job_is_its_tokens_joined(world: World) -> None:
    pulled = world.take()
    halves = [text for text in NASTY if not text.encode("utf-8", "replace").startswith(b"?")]
    world.say(pulled, *halves)
    assert world.store.view(pulled.record.id)["text"] == "".join(halves)


def test_the_channel_carries_one_line_of_documented_json(world: World) -> None:
    pulled = world.take()
    with world.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"slotline:events:{pulled.record.id}")
        channel.get_message(timeout=5)
        world.say(pulled, "é")
        message: dict[str, Any] = channel.get_message(timeout=5)
    assert json.loads(message["data"]) == {
        "event": "token",
        "id": "1-0",
        "data": {"index": 0, "text": "é", "token": 7},
    }


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner), max_leaves=9))
def test_data_comes_from_the_channel_as_it_was_written(data: Any) -> None:
    text = dumps({"any": data})
    message = f'{{"event":"done","id":"20-1","data":{text}}}'
    assert Event.from_message(message.encode()) == Event(EventId(20, 1), "done", text)


@pytest.mark.parametrize("message", [b"[]", b"", b'{"event":"token"}', b'{"event":"token","id":"1-0","data":7}'])
def test_what_is_no_event_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="no event"):
        Event.from_message(message)


@given(st.integers(0, 2**40), ANY_TEXT, st.none() | st.integers(0, 2**31))
def test_plain_tokens_are_written_as_any_other_data(index: int, text: str, token: int | None) -> None:
    assert token_data(index, text, token) == dumps({"index": index, "text": text, "token": token})
