from __future__ import annotations

import pytest

from slotline.batch.problems import BadLine
from slotline.batch.template import BadTemplate, Template


def test_columns_are_put_in_and_doubled_braces_stay() -> None:
    assert Template("Classify: {text} {{json}} {n}").fill({"text": "so", "n": 3}) == "Classify: so {json} 3"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), ("a", "a"), (1.5, "1.5"), (True, "true"), ({"k": ["é"]}, '{"k": ["é"]}'), ("{x}", "{x}")],
)
def test_text_stays_null_is_nothing_and_the_rest_is_json(value: object, shown: str) -> None:
    assert Template("{v}").fill({"v": value}) == shown


def test_a_name_may_hold_what_python_would_take_apart() -> None:
    assert Template("{a.b} {c[0]} {two words}").fill({"a.b": 1, "c[0]": 2, "two words": 3}) == "1 2 3"


@pytest.mark.parametrize("text", ["{", "}", "{text", "{}", "{x!r}", "{x:>10}"])
def test_a_brace_that_is_no_column_is_refused(text: str) -> None:
    with pytest.raises(BadTemplate, match="--template"):
        Template(text)


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(BadLine, match=r"no column 'tex'.*'text', 'n'"):
        Template("{tex}").fill({"text": "a", "n": 1})
