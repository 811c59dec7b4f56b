"""Memory does not grow with the input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slotline.batch.writing import rows_in

RUN = """
import resource, sys
from slotline.batch.lines import Rules
from slotline.batch.reading import open_source
from slotline.batch.session import Session, Settings
from tests.slotline.batch.stand_in import StandIn, StandInBackend

class Forgetful(list):
    def append(self, line): pass

runner = StandIn(at_once=3)
runner.started = Forgetful()
order = sys.argv[3]
assert Session(open_source(sys.argv[1]), Rules(), StandInBackend(runner), Settings(sys.argv[2], order=order)).run() == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(folder: Path, lines: int, kind: str, order: str) -> int:
    source, out = folder / f"in-{lines}.jsonl", folder / f"out-{lines}.jsonl"
    with source.open("w") as file:
        for number in range(lines):
            body = {"prompt": f"line {number} " + "x" * 100}
            request = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(body if kind == "plain" else request) + "\n")
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(source), str(out), order],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert sum(1 for _ in rows_in(out)) == lines
    return int(ran.stdout)


@pytest.mark.parametrize(("kind", "order"), [("plain", "finished"), ("openai", "input")])
def test_ten_times_the_lines_need_no_more_memory(tmp_path: Path, kind: str, order: str) -> None:
    assert peak(tmp_path, 20_000, kind, order) <= 1.05 * peak(tmp_path, 2_000, kind, order)
