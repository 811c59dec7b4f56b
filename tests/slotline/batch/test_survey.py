from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotline.batch.index import LineIndex
from slotline.batch.lines import LineReader, Rules, content_hash
from slotline.batch.problems import BadInput
from slotline.batch.reading import open_source
from slotline.batch.survey import lines_left, survey


def reader(tmp_path: Path, *lines: Any) -> LineReader:
    path = tmp_path / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return LineReader(open_source(str(path)), Rules())


def openai(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}


def test_every_broken_line_is_told_with_its_number(tmp_path: Path) -> None:
    with LineIndex() as index, pytest.raises(BadInput) as bad:
        survey(reader(tmp_path, openai("a"), "[1]", "", openai("b"), "{", openai("a")), index)
    assert str(bad.value).splitlines() == [
        "line 2: not a JSON object",
        "line 5: not JSON: Expecting property name enclosed in double quotes (character 3)",
        "line 6: has the `custom_id` of line 1, 'a'",
    ]


def test_of_many_broken_lines_the_first_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    with LineIndex() as index, pytest.raises(BadInput) as bad:
        survey(reader(tmp_path, *["x"] * 33), index)
    assert str(bad.value).splitlines()[-1] == "and 13 more"


def test_an_input_without_lines_is_refused(tmp_path: Path) -> None:
    with LineIndex() as index, pytest.raises(BadInput, match="no lines"):
        survey(reader(tmp_path, "", "  "), index)


def test_lines_that_have_their_row_are_left_out(tmp_path: Path) -> None:
    given = reader(tmp_path, *({"prompt": f"p{n}"} for n in range(1, 7)))
    with LineIndex() as index:
        assert survey(given, index) == (6, 6)
        index.add_done(2, content_hash({"prompt": "p2"}))
        index.add_done(4, content_hash({"prompt": "p4"}))
        assert [line.number for line in lines_left(given, index, None, surveyed=True)] == [1, 3, 5, 6]
        assert [line.number for line in lines_left(given, index, 3, surveyed=True)] == [1, 3]


def test_of_a_limit_the_lines_that_are_wanted_are_counted_and_the_last_is_named(tmp_path: Path) -> None:
    given = reader(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}, "", {"prompt": "c"})
    with LineIndex() as index:
        assert survey(given, index, 2) == (2, 3)
        assert survey(given, index, 9) == (3, 5)
    with LineIndex() as index, pytest.raises(BadInput, match="line 2"):
        survey(reader(tmp_path, {"prompt": "a"}, "broken"), index, 1)


def test_without_a_survey_an_input_without_lines_is_refused_too(tmp_path: Path) -> None:
    with LineIndex() as index, pytest.raises(BadInput, match="no lines"):
        list(lines_left(reader(tmp_path, ""), index, None, surveyed=False))


def test_a_row_of_another_content_is_refused(tmp_path: Path) -> None:
    with LineIndex() as index:
        index.add_done(1, content_hash({"prompt": "other"}))
        with pytest.raises(BadInput, match="line 1: its row in the output was made of another content"):
            list(lines_left(reader(tmp_path, {"prompt": "p"}), index, None, surveyed=True))


def test_without_a_survey_ids_are_checked_on_the_way(tmp_path: Path) -> None:
    with LineIndex() as index:
        left = lines_left(reader(tmp_path, openai("a"), openai("a")), index, None, surveyed=False)
        assert next(left).number == 1
        with pytest.raises(BadInput, match="line 2: has the `custom_id` of line 1"):
            next(left)
