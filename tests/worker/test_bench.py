from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.bench import run


def test_the_bench_prints_a_figure_for_each_batch_and_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake:babble", [1, 3], as_json=True, tokens=8, rounds=1) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(f["batch"], f["mode"]) for f in figures] == [(b, m) for b in (1, 3) for m in ("greedy", "sampled")]
    for figure in figures:
        assert figure["ratio"] == pytest.approx(figure["engine_tok_s"] / figure["raw_tok_s"], rel=0.05)
        assert figure["single_tok_s"] is None


def test_the_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake:babble", [2], as_json=False, tokens=4, rounds=1) == 0
    assert "ratio" in capsys.readouterr().out


def test_a_model_that_cannot_be_loaded_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert run(str(missing), [1], as_json=True) == 2
    _progress, error = capsys.readouterr().err.strip().splitlines()
    assert str(missing) in error


@pytest.mark.model
def test_the_bench_compares_with_one_request_at_a_time(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(demo_model), [2], as_json=True, tokens=8, rounds=1) == 0
    figures = json.loads(capsys.readouterr().out)
    assert all(figure["single_tok_s"] > 0 for figure in figures)
