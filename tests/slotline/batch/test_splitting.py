from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotline.batch.lines import Line
from slotline.batch.problems import BadInput, Problem
from slotline.batch.splitting import openai_line, pieces


def plain(number: int, **body: Any) -> Line:
    return Line(number, {}, "/v1/jobs", body or {"prompt": f"p{number}"})


def contents(*lines: Line | Problem, **limits: int) -> list[tuple[str, list[dict[str, Any]]]]:
    found = []
    for piece in pieces(lines, **limits):
        requests = [json.loads(line) for line in piece.path.read_text().splitlines()]
        assert piece.lines == len(requests)
        assert piece.bytes == piece.path.stat().st_size
        found.append((piece.endpoint, requests))
    return found


def test_a_plain_line_becomes_an_openai_line_of_the_endpoint_it_is_for() -> None:
    assert json.loads(openai_line(plain(3))[1]) == {
        "custom_id": "line-3",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "p3"},
    }
    assert openai_line(plain(3, messages=[]))[0] == "/v1/chat/completions"


def test_an_openai_line_keeps_its_id_and_endpoint() -> None:
    endpoint, data = openai_line(Line(3, {}, "/v1/embeddings", {"input": "a"}, custom_id="mine"))
    assert endpoint == "/v1/embeddings"
    assert json.loads(data)["custom_id"] == "mine"


def test_a_piece_holds_so_many_lines_at_most() -> None:
    found = contents(*map(plain, range(1, 8)), max_lines=3)
    assert [len(requests) for _, requests in found] == [3, 3, 1]
    assert [r["custom_id"] for _, requests in found for r in requests] == [f"line-{n}" for n in range(1, 8)]


def test_a_piece_holds_so_many_bytes_at_most() -> None:
    size = len(openai_line(plain(1))[1])
    assert [len(requests) for _, requests in contents(*map(plain, range(1, 6)), max_bytes=2 * size)] == [2, 2, 1]


def test_each_piece_is_of_one_endpoint() -> None:
    found = contents(plain(1), plain(2, messages=[]), plain(3))
    assert [(endpoint, len(requests)) for endpoint, requests in found] == [
        ("/v1/completions", 2),
        ("/v1/chat/completions", 1),
    ]


def test_a_line_that_no_batch_takes_is_refused_with_its_number() -> None:
    with pytest.raises(BadInput, match="line 2: has .* bytes; a batch takes at most 150"):
        contents(plain(1), plain(2, prompt="x" * 200), max_bytes=150)


def test_the_files_are_gone_in_the_end() -> None:
    paths: list[Path] = [piece.path for piece in pieces(map(plain, range(1, 4)), max_lines=1)]
    assert len(paths) == 3
    assert not any(path.exists() for path in paths)
