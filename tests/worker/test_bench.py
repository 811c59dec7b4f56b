from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker import bench_constrained, bench_sampling
from worker.bench import run
from worker.grammar import check


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


@pytest.mark.model
def test_the_bench_of_grammars_compares_ticks_with_and_without(
    demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_constrained.run(str(demo_model), [2], 1, as_json=True, tokens=3, rounds=1) == 0
    figures = json.loads(capsys.readouterr().out)
    measured = [(f["batch"], f["constrained"], f["mode"], f["kind"]) for f in figures]
    assert measured == [(2, 1, m, k) for m in ("greedy", "sampled") for k in ("response_format", "grammar")]
    for figure in figures:
        assert figure["ratio"] == pytest.approx(figure["tick_ms"] / figure["free_tick_ms"], rel=0.05)


def test_the_bench_of_grammars_gives_up_on_a_model_whose_answers_end_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench_constrained.run("fake:babble", [4], 2, as_json=True, tokens=2, rounds=1) == 2
    assert "answers are so short" in capsys.readouterr().err


def test_the_grammar_of_the_bench_is_one_that_we_accept() -> None:
    assert check(bench_constrained.JSON_GRAMMAR, "root").rules.keys() >= {"object", "string", "number"}


@pytest.mark.parametrize("as_json", [True, False])
def test_the_bench_of_sampling_measures_each_number_of_rows(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    bench_sampling.run([1, 4], 3000, 2, as_json)
    out = capsys.readouterr().out
    if not as_json:
        assert "two threads ms" in out
        return
    figures = json.loads(out)
    assert [(f["rows"], f["mode"]) for f in figures] == [(r, m) for r in (1, 4) for m in ("greedy", "sampled")]
    assert all(figure["one_thread_ms"] > 0 and figure["two_threads_ms"] > 0 for figure in figures)
