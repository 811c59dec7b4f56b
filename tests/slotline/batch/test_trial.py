from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotline.batch.lines import Rules
from slotline.batch.problems import BadInput
from slotline.batch.reading import open_source
from slotline.batch.trial import COUNTED, dry_run, spread
from tests.slotline.batch.stand_in import StandIn, StandInBackend, refused


def tried(tmp_path: Path, lines: list[Any], runner: StandIn | None = None, limit: int | None = None) -> int:
    path = tmp_path / "in.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    backend: Any = StandInBackend(runner or StandIn())
    return dry_run(open_source(str(path)), Rules(), backend, limit, None)


def test_it_counts_and_estimates_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = StandIn(slots=2)
    assert tried(tmp_path, [{"prompt": "two words"}] * 100, runner) == 0
    told = capsys.readouterr().out
    assert "lines          100, of which 0 cannot be served" in told
    assert "prompt tokens  200 (2 a line, at most 2)" in told
    assert "new tokens     about 200 (2 a line)" in told
    assert "time           about 0 s" in told
    assert len(runner.started) == 8
    assert runner.closed == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_tokens_of_a_large_input_are_reckoned_from_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried(tmp_path, [{"prompt": "two words"}] * (3 * COUNTED))
    assert f"about {6 * COUNTED} (2 a line, at most 2 among {COUNTED} that were counted)" in capsys.readouterr().out


def test_lines_that_cannot_be_served_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(tmp_path, [{"prompt": "a"}, {"prompt": "a", "temperature": 99}, {"prompt": ""}]) == 1
    shown = capsys.readouterr()
    assert "of which 2 cannot be served" in shown.out
    assert "line 2: `temperature`" in shown.err
    assert "line 3: `prompt` is empty" in shown.err


def test_lines_that_fail_in_the_sample_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(tmp_path, [{"prompt": "a"}] * 3, StandIn(refused)) == 1
    assert "first failure  line 1: `prompt` is too long" in capsys.readouterr().out


def test_broken_lines_are_refused_before_anything_is_run(tmp_path: Path) -> None:
    runner = StandIn()
    with pytest.raises(BadInput, match="line 2"):
        tried(tmp_path, [{"prompt": "a"}, "x"], runner)
    assert runner.started == []


def test_only_the_lines_that_are_wanted_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried(tmp_path, [{"prompt": "a"}] * 100, limit=10)
    assert "lines          10," in capsys.readouterr().out


def test_standard_input_is_refused() -> None:
    backend: Any = StandInBackend()
    with pytest.raises(BadInput, match="give it a file"):
        dry_run(open_source("-"), Rules(), backend, None, None)


@pytest.mark.parametrize(("total", "count"), [(100, 10), (7, 7), (3, 10), (1001, 1000)])
def test_the_sample_is_spread_evenly(total: int, count: int) -> None:
    chosen: list[Any] = list(spread(iter(range(total)), total, count))  # type: ignore[arg-type]
    assert len(chosen) == min(total, count)
    gaps = [b - a for a, b in zip(chosen, chosen[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1
