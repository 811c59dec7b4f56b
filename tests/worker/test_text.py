from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text import TextAssembler


def assemble(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], TextAssembler]:
    assembler = TextAssembler(stops)
    out = []
    for piece in pieces:
        out.append(assembler.push(piece))
        if assembler.stopped:
            return out, assembler
    return [*out, assembler.finish()], assembler


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({c % (len(data) + 1) for c in cuts}), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(st.text(), st.lists(st.integers(0, 500)))
def test_valid_text_comes_out_the_same_however_it_is_cut(text: str, cuts: list[int]) -> None:
    text = text.encode("utf-8", "replace").decode()
    out, assembler = assemble(split(text.encode(), cuts))
    assert "".join(out) == assembler.text == text


@given(st.binary(), st.lists(st.integers(0, 500)))
def test_any_bytes_give_the_same_text_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    out, _ = assemble(split(data, cuts))
    assert "".join(out) == data.decode("utf-8", "replace")
    "".join(out).encode("utf-8")


def test_loose_bytes_at_the_end_become_one_replacement_mark() -> None:
    out, _ = assemble(["😀".encode()[:3]])
    assert out == ["", "\ufffd"]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stops_cut_at_the_first_match_and_never_show(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, 30)))
    out, assembler = assemble(split(text.encode(), cuts), tuple(stops))
    shown = "".join(out)
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    if not any(stop in text for stop in stops):
        assert shown == text and not assembler.stopped
    else:
        assert assembler.stopped


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=5))
def test_one_character_at_a_time_cuts_where_find_does(text: str, stop: str) -> None:
    out, _ = assemble([c.encode() for c in text], (stop,))
    at = text.find(stop)
    assert "".join(out) == (text if at < 0 else text[:at])


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [(["O", " P", " Q"], ["", "", ""]), (["O", " P", " X"], ["", "", "O P X", ""]), (["O P"], ["", "O P"])],
)
def test_what_may_begin_a_stop_string_is_held_back_until_certain(pieces: list[str], expected: list[str]) -> None:
    out, _ = assemble([p.encode() for p in pieces], ("O P Q",))
    assert out == expected


def test_a_stop_string_inside_one_token_cuts_the_token() -> None:
    out, assembler = assemble([b"well END more"], ("END",))
    assert out == ["well "] and assembler.stopped and assembler.finish() == ""
