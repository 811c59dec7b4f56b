from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotline.sse import SseEvent, SseParser


def parse(*chunks: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_any_of_the_three_line_ends_ends_a_line(end: bytes) -> None:
    stream = end.join([b"event: token", b"id: 4", b'data: {"index": 4}', b"", b""])
    assert parse(stream) == [SseEvent("token", '{"index": 4}', "4")]
    assert parse(stream)[0].json() == {"index": 4}


def test_comments_unknown_fields_and_retry_are_ignored() -> None:
    assert parse(b": hello\n\nretry: 1000\n\ncolour: red\ndata: x\n\n") == [SseEvent("message", "x", "")]


def test_lines_of_data_are_joined_and_one_space_is_dropped() -> None:
    assert parse(b"data:  a\ndata:b\ndata\n\n")[0].data == " a\nb\n"


def test_an_id_stays_for_later_events_and_one_with_a_zero_character_is_ignored() -> None:
    assert [e.id for e in parse(b"id: 7\ndata: a\n\ndata: b\n\nid: 8\0\ndata: c\n\n")] == ["7", "7", "7"]


def test_an_event_without_data_is_no_event_and_forgets_its_name() -> None:
    assert parse(b"event: done\nid: end\n\ndata: x\n\n") == [SseEvent("message", "x", "end")]


def test_an_event_that_the_connection_cut_off_never_happened() -> None:
    assert parse(b"data: a\n\ndata: b\n") == [SseEvent("message", "a", "")]


def test_a_byte_order_mark_is_dropped_at_the_very_start_only() -> None:
    assert [e.data for e in parse(b"\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbfb\n\n")] == ["a", "\ufeffb"]


def test_bytes_that_are_not_utf_8_become_replacement_marks() -> None:
    assert parse(b"data: \xff\n\n")[0].data == "\ufffd"


texts = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]))
frames = st.lists(st.tuples(texts, st.lists(texts, min_size=1)), max_size=6)


@given(frames, st.sampled_from(["\n", "\r", "\r\n"]), st.randoms(use_true_random=False))
def test_the_events_do_not_depend_on_the_pieces_they_arrive_in(frames, end, random) -> None:
    stream = b""
    for name, lines in frames:
        rows = [f"event: {name}", *(f"data: {line}" for line in lines), "", ""]
        stream += end.join(rows).encode()
    cuts = sorted(random.randint(0, len(stream)) for _ in range(random.randint(0, 12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    expected = [SseEvent(name or "message", "\n".join(lines), "") for name, lines in frames]
    assert parse(*pieces) == parse(stream) == expected
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == expected
