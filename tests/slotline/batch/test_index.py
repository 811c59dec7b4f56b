from __future__ import annotations

from slotline.batch.index import LineIndex


def test_an_id_that_comes_twice_names_the_first_line() -> None:
    with LineIndex() as index:
        assert index.add_id("a", 1) is None
        assert index.add_id("b", 2) is None
        assert index.add_id("a", 3) == 1
        assert (index.line_of("b"), index.line_of("c")) == (2, None)


def test_a_line_is_done_once() -> None:
    with LineIndex() as index:
        assert index.done(1) is None
        assert index.add_done(1, b"hash")
        assert not index.add_done(1, b"other")
        assert index.done(1) == b"hash"
        index.add_done(7)
        assert [index.done_count(last) for last in (0, 1, 6, 7)] == [0, 1, 1, 2]


def test_places_come_in_the_order_of_the_lines() -> None:
    with LineIndex() as index:
        for line, place in ((3, 0), (1, 10), (2, 20)):
            index.add_place(line, place)
        assert list(index.places()) == [10, 20, 0]
