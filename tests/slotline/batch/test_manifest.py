from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slotline.batch.manifest import Refused, claim, manifest_path

PRINT: dict[str, Any] = {
    "input": {"bytes": 10, "sha256": "x"},
    "format": "jsonl",
    "model": "m",
    "template": None,
    "system": None,
    "chat": False,
    "options": {"max_tokens": 5},
    "seed": 0,
    "order": "finished",
    "errors": None,
}


def hold(out: Path, overwrite: bool = False, others: tuple[Path, ...] = (), **changes: Any) -> Any:
    return claim(out, others, {**PRINT, **changes}, overwrite)


def test_the_same_run_goes_on_under_its_name(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with hold(out) as first:
        assert first.is_new
        out.write_text("rows\n")
    with hold(out) as second:
        assert not second.is_new
        assert second.run == first.run


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"input": {"bytes": 11, "sha256": "y"}}, "the input"),
        ({"model": "n"}, 'the model: was "m" and is "n"'),
        ({"template": "{a}"}, '--template: was not given and is "{a}"'),
        ({"options": {"max_tokens": 6, "top_k": 1}}, "max_tokens was 5 and is 6, top_k was not given and is 1"),
        ({"seed": 1}, "--seed: was 0 and is 1"),
        ({"order": "input"}, "--order"),
        ({"errors": "/x"}, "--errors"),
        ({"system": "s"}, "--system"),
        ({"chat": True}, "--chat"),
        ({"format": "csv"}, "--format"),
    ],
)
def test_another_run_is_refused_naming_what_differs(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    out = tmp_path / "out.jsonl"
    with hold(out):
        out.write_text("rows\n")
    with pytest.raises(Refused) as refusal, hold(out, **change):
        pass
    assert told in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 3, "one difference, one line"
    with hold(out) as again:
        assert not again.is_new, "a refusal changes nothing"


def test_overwriting_begins_anew_and_removes_what_belongs_to_the_output(tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    with hold(out) as first:
        out.write_text("rows\n")
        errors.write_text("rows\n")
    with hold(out, overwrite=True, others=(errors,), seed=3) as second:
        assert second.is_new
        assert second.run != first.run
        assert not out.exists()
        assert not errors.exists()
        out.write_text("rows\n")
    with hold(out, seed=3) as third:
        assert third.run == second.run


@pytest.mark.parametrize("name", ["out.jsonl", "errors.jsonl"])
def test_a_file_that_is_nobodys_is_not_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious\n")
    with pytest.raises(Refused, match=f"{name} exists"), hold(tmp_path / "out.jsonl", others=(tmp_path / name,)):
        pass
    assert (tmp_path / name).read_text() == "precious\n"
    assert not manifest_path(tmp_path / "out.jsonl").exists()


def test_rows_beside_a_manifest_that_was_not_finished_are_nobodys(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("rows\n")
    manifest_path(out).write_text('{"version": 1, "ru')
    with pytest.raises(Refused, match=r"manifest\.json is damaged"), hold(out):
        pass
    assert manifest_path(out).exists(), "somebody may want to mend it"


def test_what_came_from_standard_input_is_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with hold(out, input=None):
        out.write_text("rows\n")
    with pytest.raises(Refused, match="standard input or a pipe cannot be resumed"), hold(out, input=None):
        pass


def test_where_nothing_was_written_any_run_may_begin(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with hold(out, input=None):
        out.touch()
    with hold(out, input=None, seed=5) as second:
        assert second.is_new


def test_two_runs_never_write_one_output(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with hold(out), pytest.raises(Refused, match="another `slotline batch run` is writing"), hold(out):
        pass


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with hold(out):
        out.write_text("rows\n")
    path = manifest_path(out)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(Refused, match="another version of slotline"), hold(out):
        pass


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be written"), hold(tmp_path / "none" / "out.jsonl"):
        pass
