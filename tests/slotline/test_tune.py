from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import slotline
from slotline.cli import cli
from slotline.cli.chart import Mark, scatter

ROOT = Path(slotline.__file__).parent.parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLOTLINE_")]:
        monkeypatch.delenv(name)


def tune(*args: str) -> Result:
    return CliRunner().invoke(cli, ["tune", *args])


def test_it_shows_a_table_and_a_chart_and_a_line_to_paste() -> None:
    result = tune("--model", "fake:babble:0.002", "--seconds", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines[: lines.index("tokens/s")]]
    slots = [int(row[0]) for row in rows if len(row) == 3 and row[0].isdigit()]
    assert slots and slots == [1, 2, 4, 8, 16, 32, 64][: len(slots)]
    assert any("ms per token, for each number of slots" in line for line in lines)
    best = next(line for line in lines if line.startswith("Best is"))
    command = shlex.split(lines[-1])
    given = dict(zip(command[-6::2], command[-5::2], strict=True))
    assert given == {"--model": "fake:babble:0.002", "--n-parallel": best[9:-2], "--n-ctx": "8192"}
    assert command[-7] == "worker"
    assert "\x1b" not in result.stdout
    assert "prefill: " in result.stderr


def test_as_json_it_is_one_object() -> None:
    result = tune("--model", "fake:babble", "--seconds", "1", "--json", "--threads", "1", "--kv-unified", "off")
    found = json.loads(result.stdout)
    assert found["model"] == "fake:babble"
    assert [point["slots"] for point in found["points"]][0] == 1
    assert found["best"] in found["points"]
    assert found["command"].endswith(
        f"worker --model fake:babble --n-parallel {found['best']['slots']} --n-ctx {found['n_ctx']} "
        "--threads 1 --kv-unified off"
    )


def test_the_context_that_is_asked_for_is_the_one_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_N_CTX", "1024")
    monkeypatch.setenv("SLOTLINE_N_PARALLEL", "2")
    found = json.loads(tune("--model", "fake:babble", "--seconds", "1", "--json").stdout)
    assert found["n_ctx"] == 1024
    assert max(point["slots"] for point in found["points"]) <= 16
    assert "--n-ctx 1024" in found["command"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "missing.gguf"), "the model file missing.gguf does not exist"),
        (("--model", __file__), "is not a GGUF file"),
        (("--model", "fake:nothing"), "there is no script 'nothing'"),
        (("--model", "fake:echo", "--n-ctx", "many"), "--n-ctx='many'"),
        (("--model", "fake:echo", "--n-ctx", "16"), "n_ctx 16 is too small for 1 slots"),
        (("--model", "fake:echo", "--seconds", "0"), "--seconds"),
    ],
)
def test_what_is_wrong_is_told_with_status_2(args: tuple[str, ...], message: str) -> None:
    result = tune(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "slotline", "tune", "--model", "fake:echo:0.05", "--seconds", "60"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "prefill: " in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err


def test_marks_stand_where_their_numbers_are() -> None:
    lines = scatter([Mark(10, 100, "a"), Mark(100, 50, "b"), Mark(1000, 0, "[c]")], "x", "y", width=41, height=5)
    assert lines == [
        "y",
        "100 |a",
        "    |",
        " 50 |" + " " * 19 + " b",
        "    |",
        "  0 |" + " " * 38 + "[c]",
        "    +" + "-" * 41,
        "     10" + " " * 35 + "1000",
        "     " + " " * 40 + "x",
    ]


def test_labels_do_not_hide_each_other() -> None:
    lines = scatter([Mark(10, 5, "1"), Mark(10, 5, "22"), Mark(10, 5, "3")], "x", "y", width=20, height=3)
    assert lines[1].endswith("|1 22 3")


def test_a_single_mark_is_a_chart_too() -> None:
    assert scatter([Mark(3, 7, "1")], "x", "y", width=10, height=3)[1] == "7 |1"
