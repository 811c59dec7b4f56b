"""`slotline batch run` with processes of its own, killed at odd moments."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from slotline import Client
from slotline.batch.backends import Backend
from slotline.batch.embedded import EmbeddedRunner
from slotline.batch.lines import Rules
from slotline.batch.problems import BadInput
from slotline.batch.reading import open_source
from slotline.batch.session import Session, Settings
from tests.processes import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


class BatchRun:
    """A folder with an input, and the command over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out.jsonl"
        self.started: list[subprocess.Popen[str]] = []

    def write(self, *lines: Any, name: str = "in.jsonl") -> None:
        (self.folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, *args: str, model: str = "fake:echo", source: str = "in.jsonl") -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "slotline", "batch", "run", source, "-o", "out.jsonl"]
        self.started.append(
            subprocess.Popen(
                [*command, "--model", model, *args],
                cwd=self.folder,
                env={**os.environ, "SLOTLINE_DATA_DIR": str(self.folder / "data")},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.started[-1]

    def run(self, *args: str, **given: Any) -> tuple[int, str]:
        process = self.start(*args, **given)
        _, told = process.communicate(timeout=300)
        return process.returncode, told

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def has(self, count: int) -> bool:
        """Whether so many rows are there."""
        return self.written() >= count

    def written(self) -> int:
        """Rows that are in the file, a torn last one not counted."""
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[BatchRun]:
    batch = BatchRun(tmp_path)
    yield batch
    for process in batch.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Lent:
    """A runner that closing does not end."""

    def __init__(self, runner: EmbeddedRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def close(self) -> None:
        pass


class Kept:
    """A backend whose runner is used by one session after another."""

    def __init__(self, runner: EmbeddedRunner) -> None:
        self.runner = runner

    def model_name(self) -> str:
        return self.runner.model

    def open(self, say: Any) -> Any:
        return Lent(self.runner)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    """One Valkey and worker for every test that only looks at the rows."""
    with closing(EmbeddedRunner("fake:echo", 4)) as runner:
        yield Kept(runner)


def here(batch: BatchRun, kept: Kept, rules: Rules | None = None, **settings: Any) -> int:
    """Run the input over the kept runner; returns the exit status."""
    source, backend = open_source(str(batch.folder / "in.jsonl")), cast(Backend, kept)
    return Session(source, rules or Rules(), backend, Settings(str(batch.out), **settings)).run()


def test_killed_twice_every_line_has_its_row_once(batch: BatchRun) -> None:
    count = 400
    batch.write(*({"prompt": f"line {n} ", "n": n, "max_tokens": 7} for n in range(count)))
    chance = random.Random(4)
    for kill in (kill_itself, kill_its_keeper):
        process = batch.start("--slots", "16")
        eventually(partial(batch.has, batch.written() + chance.randrange(20, 100)), "rows come", 120)
        ours = children(process.pid)
        assert process.poll() is None, "it was to be killed before it ends"
        kill(process)
        _, alive = psutil.wait_procs(ours, timeout=30)
        assert alive == [], "what it had started ends with it"
        assert 0 < batch.written() < count
    before = batch.written()
    status, told = batch.run("--slots", "16")
    assert status == 0, told
    assert f"going on with out.jsonl: {before} of {count} lines are done" in told
    assert Counter(row["n"] for row in batch.rows) == Counter(range(count))
    assert all(row["line"] == row["n"] + 1 and row["error"] is None for row in batch.rows)


def kill_itself(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def kill_its_keeper(process: subprocess.Popen[str]) -> None:
    """The run is left without its processes, says so, and ends what is left of them."""
    next(child for child in children(process.pid) if child.cmdline()[-2:] == ["batch", "keep"]).kill()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 3, told
    assert "stopped early: the process that kept Valkey and the worker was ended by signal 9" in told
    assert "to go on: " in told


def test_ctrl_c_ends_it_with_130_and_leaves_nothing_running(batch: BatchRun) -> None:
    batch.write(*({"prompt": f"line {n}"} for n in range(5000)))
    process = batch.start()
    eventually(partial(batch.has, 1), "rows come", 60)
    ours = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"to go on: {sys.executable} -m slotline batch run in.jsonl -o out.jsonl --model fake:echo\n" in told
    assert psutil.wait_procs(ours, timeout=10)[1] == []
    assert Counter(row["line"] for row in batch.rows).most_common(1)[0][1] == 1


def test_ctrl_c_while_the_model_loads_leaves_nothing_running(batch: BatchRun) -> None:
    batch.write({"prompt": "a"})
    process = batch.start()
    eventually(lambda: len(children(process.pid)) > 1, "its processes start", 60)
    ours = children(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert psutil.wait_procs(ours, timeout=30)[1] == []


def test_lines_that_cannot_be_served_are_rows_and_the_others_run(batch: BatchRun, kept: Kept) -> None:
    lines: list[dict[str, Any]] = [{"prompt": f"line {n}", "max_tokens": 5} for n in range(100)]
    lines[10]["prompt"] = "x" * 20_000
    lines[20]["temperature"] = 99
    batch.write(*lines)
    assert here(batch, kept) == 1
    errors = {row["line"]: row["error"]["code"] for row in batch.rows if row["error"]}
    assert errors == {11: "context_length_exceeded", 21: "invalid_request"}
    assert len(batch.rows) == 100


def test_an_option_that_no_line_can_be_served_with_is_refused(batch: BatchRun, kept: Kept) -> None:
    batch.write({"prompt": "a"})
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "format": "odd"}}}
    for options, told in (({"temperature": 99}, "temperature"), ({"response_format": schema}, "the format 'odd'")):
        with pytest.raises(BadInput, match=f"the options of the command cannot be served: .*{told}"):
            here(batch, kept, Rules(options=options))
    assert not batch.out.exists()


def test_openai_lines_of_every_kind(batch: BatchRun, kept: Kept) -> None:
    def line(custom_id: str, endpoint: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{endpoint}", "body": body}

    batch.write(
        line("chat", "chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3, n=2),
        line("text", "completions", prompt=["one", "two"], max_tokens=3),
        line("unknown", "completions", prompt="a", model="gpt"),
        line("odd", "completions", prompt="a", no_such_field=1),
    )
    assert here(batch, kept, Rules(seed=3), order="input") == 1
    chat, text, unknown, odd = batch.rows
    assert [row["custom_id"] for row in batch.rows] == ["chat", "text", "unknown", "odd"]
    assert [choice["index"] for choice in chat["response"]["body"]["choices"]] == [0, 1]
    assert len(text["response"]["body"]["choices"]) == 2
    assert unknown["response"]["status_code"] == 404
    assert odd["response"]["status_code"] == 400
    assert "no_such_field" in odd["response"]["body"]["error"]["message"]


def test_a_worker_that_cannot_run_is_told_in_its_own_words(batch: BatchRun) -> None:
    batch.write({"prompt": "a"})
    (batch.folder / "bad.gguf").write_bytes(b"no model")
    status, told = batch.run(model="bad.gguf")
    assert status == 2
    assert "bad.gguf" in told.splitlines()[-1]
    assert not batch.out.exists() or not batch.rows


def test_the_same_seed_gives_the_same_answers_here_and_on_a_server(batch: BatchRun, kept: Kept, up: str) -> None:
    batch.write(*({"prompt": "the same prompt", "max_tokens": 8} for _ in range(12)))
    rules = Rules(options={"temperature": 1.5})
    assert here(batch, kept, rules, order="input") == 0
    first = [row["text"] for row in batch.rows]
    again = over(
        batch, up, "run", "in.jsonl", "-o", "out.jsonl", "--order", "input", "--temperature", "1.5", "--overwrite"
    )
    assert (again.returncode, [row["text"] for row in batch.rows]) == (0, first), again.stderr
    assert len(set(first)) > 1, "each line draws for itself"


@pytest.mark.model
def test_the_sample_that_comes_with_us_runs_on_the_demo_model(batch: BatchRun) -> None:
    import slotline.batch

    sample = Path(slotline.batch.__file__).with_name("sample.jsonl")
    from worker.demo import demo_model_path

    status, told = batch.run("--max-tokens", "4", source=str(sample), model=str(demo_model_path()))
    assert status == 0, told
    assert len(batch.rows) == len(sample.read_text().splitlines())
    assert all(row["text"].strip() for row in batch.rows)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running `slotline up` with the scripted model, by its URL."""
    folder = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-P", "-m", "slotline", "up", "--model", "fake:echo", "--port", "0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--data-dir", str(folder / "data")], stdout=log, stderr=log)
    try:
        found = eventually(partial(_ready_at, folder / "log", process), "it is ready", 120)
        yield found
    finally:
        process.terminate()
        process.wait(timeout=60)


def _ready_at(log: Path, process: subprocess.Popen[bytes]) -> str | None:
    assert process.poll() is None, log.read_text()
    found = re.search(r"is ready at (\S+),", log.read_text())
    return found[1] if found else None


def over(batch: BatchRun, up: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "slotline", "batch", *args, "--url", up]
    return subprocess.run(command, cwd=batch.folder, capture_output=True, text=True, timeout=200, check=False)


def test_a_run_on_a_server_is_resumed_after_a_kill(batch: BatchRun, up: str) -> None:
    count = 300
    batch.write(*({"prompt": f"line {n} ", "n": n, "max_tokens": 5} for n in range(count)))
    command = [sys.executable, "-P", "-m", "slotline", "batch", "run", "in.jsonl", "-o", "out.jsonl", "--url", up]
    process = subprocess.Popen(command, cwd=batch.folder)
    eventually(partial(batch.has, 30), "rows come", 120)
    assert process.poll() is None, "it was to be killed before it ends"
    process.kill()
    process.wait()
    done = over(batch, up, "run", "in.jsonl", "-o", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert Counter(row["n"] for row in batch.rows) == Counter(range(count))
    assert all(row["line"] == row["n"] + 1 and row["text"] for row in batch.rows)


def test_openai_lines_run_on_a_server(batch: BatchRun, up: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    odd = {**body, "no_such_field": 1}
    batch.write(
        *(
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": given}
            for name, given in (("good", body), ("odd", odd))
        )
    )
    done = over(batch, up, "run", "in.jsonl", "-o", "out.jsonl", "--order", "input")
    assert done.returncode == 1, done.stderr
    good, odd_row = batch.rows
    assert good["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert odd_row["response"]["status_code"] == 400
    assert "no_such_field" in odd_row["response"]["body"]["error"]["message"]


def test_ctrl_c_cancels_the_jobs_of_a_run_on_a_server(batch: BatchRun, up: str) -> None:
    batch.write(*({"prompt": "x" * 200, "max_tokens": 4000, "ignore_eos": True} for _ in range(30)))
    command = [sys.executable, "-P", "-m", "slotline", "batch", "run", "in.jsonl", "-o", "out.jsonl", "--url", up]
    with Client(up) as client:
        process = subprocess.Popen(command, cwd=batch.folder)
        eventually(lambda: client.jobs(status="running")["data"], "jobs run", 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        alive = ("queued", "running")
        eventually(lambda: not any(client.jobs(status=status)["data"] for status in alive), "all are cancelled", 60)
        assert client.jobs(status="cancelled")["data"]


def test_a_batch_of_the_server_from_submit_to_download(batch: BatchRun, up: str) -> None:
    batch.write({"prompt": "a", "max_tokens": 3}, {"prompt": "b", "temperature": 99})
    done = over(batch, up, "submit", "in.jsonl", "--wait", "--json")
    assert done.returncode == 1, "one line fails"
    made = json.loads(done.stdout)
    assert made["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    got = over(batch, up, "download", made["id"], "-o", "out.jsonl", "--errors", "errors.jsonl")
    assert got.returncode == 0, got.stderr
    assert [row["custom_id"] for row in batch.rows] == ["line-1"]
    (failed,) = map(json.loads, (batch.folder / "errors.jsonl").read_text().splitlines())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("line-2", 400)
    again = over(batch, up, "retry", made["id"])
    assert again.returncode == 0, again.stderr


def test_a_map_over_a_server(up: str) -> None:
    with Client(up) as client:
        results = client.map((f"prompt {n}" for n in range(100)), window=8, max_tokens=4, temperature=0)
        assert [result.text[:1] for result in results] == ["p"] * 100
