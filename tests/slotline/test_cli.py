from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import slotline
from shared.names import WORKERS
from shared.registry import Registry, WorkerStats
from slotline.cli import COMMANDS, cli
from tests.slotline.scripted import STARTED, ScriptedServer, answer, done, error, events, frame, job, token

EVENTS = "/v1/jobs/job1/events"
ROOT = Path(slotline.__file__).parent.parent


@pytest.fixture
def run(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLOTLINE_URL", server.url)

    def run(*args: str, **given) -> Result:
        result = CliRunner().invoke(cli, args, **given)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def test_submit_prints_the_id_alone(server: ScriptedServer, run) -> None:
    result = run("submit", "hello", "--max-tokens", "5", "--stop", "a", "--stop", "b")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "job1\n", "")
    assert server.asked[0].body == {"prompt": "hello", "max_tokens": 5, "stop": ["a", "b"]}


def test_submit_reads_standard_input(server: ScriptedServer, run) -> None:
    run("submit", "-", input="from a pipe\n")
    assert server.asked[0].body == {"prompt": "from a pipe\n"}


def test_submit_takes_token_ids(server: ScriptedServer, run) -> None:
    run("submit", "--tokens", "1, 2,3 4")
    assert server.asked[0].body == {"prompt": [1, 2, 3, 4]}


def test_submit_makes_a_conversation(server: ScriptedServer, run) -> None:
    run("submit", "--chat", "hi", "--system", "be short")
    roles = [("system", "be short"), ("user", "hi")]
    assert server.asked[0].body == {"messages": [{"role": r, "content": c} for r, c in roles]}


def test_submit_and_wait_prints_the_text(server: ScriptedServer, run) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    assert run("submit", "hello", "--wait").stdout == "t0 t1 \n"
    assert json.loads(run("submit", "hello", "--wait", "--json").stdout) == job()


def test_submit_and_stream_prints_the_tokens(server: ScriptedServer, run) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    assert run("submit", "hello", "--stream").stdout == "t0 t1 \n"
    assert server.asked[0].body == {"prompt": "hello", "stream": True}
    lines = [json.loads(line) for line in run("submit", "hello", "--stream", "--json").stdout.splitlines()]
    assert lines == [{"index": 0, "text": "t0 ", "token": 100}, {"index": 1, "text": "t1 ", "token": 101}, job()]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["a", "--tokens", "1"],
        ["--tokens", "x"],
        ["--tokens", "1", "--chat"],
        ["a", "--system", "b"],
        ["a", "--stream", "--wait"],
        ["a", "--max-tokens", "many"],
        ["a", "--logit-bias", "5"],
        ["a", "--metadata", "{"],
        ["a", "--grammar", "@/no/such/file"],
        ["a", "--priority", "high"],
        ["a", "--nonsense"],
        ["a", "--temperature", "nan"],
        ["a\udcff"],
    ],
)
def test_submit_refuses_what_makes_no_sense_before_it_asks(server: ScriptedServer, run, args: list[str]) -> None:
    result = run("submit", *args)
    assert (result.exit_code, server.asked) == (2, [])
    assert "Error: " in result.stderr


def test_a_refusal_of_the_server_is_one_line(server: ScriptedServer, run) -> None:
    server._replies["POST", "/v1/jobs"].clear()
    server.on("POST", "/v1/jobs", answer(error(400, "invalid_request", "`seed` is -5", "seed"), 400))
    result = run("submit", "a", "--seed", "-5")
    assert result.exit_code == 1
    assert result.stderr == "slotline: `seed` is -5 (HTTP 400, invalid_request, seed)\n"


def test_a_failed_job_ends_with_its_reason(server: ScriptedServer, run) -> None:
    failed = job("failed", text="t0 ", error={"message": "no more", "code": "timeout"})
    server.on("GET", EVENTS, events(STARTED, token(0), frame("failed", failed, "end")))
    result = run("submit", "a", "--stream")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "t0 \n", "slotline: job job1 failed: no more\n")


def test_a_late_token_says_how_to_go_on(server: ScriptedServer, run) -> None:
    server.on("GET", EVENTS, events(STARTED, lambda handler: handler.reader_left()))
    result = run("submit", "a", "--stream", "--token-timeout", "0.2")
    assert result.exit_code == 1
    assert "`slotline status job1 --stream`" in result.stderr
    assert "`slotline cancel job1`" in result.stderr


def test_nobody_there_is_one_line_that_says_how_to_start_one() -> None:
    result = CliRunner().invoke(cli, ["list", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert result.stderr == (
        "slotline: no server answers at http://127.0.0.1:9: "
        "start one with `slotline up`, or name another with --url or SLOTLINE_URL\n"
    )


def test_status_shows_the_job(server: ScriptedServer, run) -> None:
    server.on("GET", "/v1/jobs/job1", answer(job("running", text="so far")))
    result = run("status", "job1")
    assert "running" in result.stdout
    assert result.stdout.endswith("\n\nso far\n")
    assert json.loads(run("status", "job1", "--json").stdout)["text"] == "so far"


def test_status_can_follow(server: ScriptedServer, run) -> None:
    server.on("GET", EVENTS, events(STARTED, token(0), token(1), done()))
    assert run("status", "job1", "--stream").stdout == "t0 t1 \n"
    assert "completed" in run("status", "job1", "--wait").stdout


def test_list_shows_a_page_and_says_that_there_is_more(server: ScriptedServer, run) -> None:
    page = {"object": "list", "data": [job(id="a"), job("failed", id="b")], "has_more": True, "next": "b"}
    server.on("GET", "/v1/jobs", answer(page))
    result = run("list", "--status", "failed", "--limit", "2")
    assert [line.split("\t")[:2] for line in result.stdout.splitlines()] == [["a", "completed"], ["b", "failed"]]
    assert result.stderr == "more with --after b\n"
    assert server.asked[0].path == "/v1/jobs?status=failed&limit=2"


def test_cancel_says_what_the_job_is_now(server: ScriptedServer, run) -> None:
    server.on("POST", "/v1/jobs/job1/cancel", answer(job("cancelled")))
    assert run("cancel", "job1").stdout == "job1 cancelled\n"


def test_models_and_stats(server: ScriptedServer, run) -> None:
    server.on("GET", "/v1/models", answer({"data": [{"id": "m", "n_ctx": 4096, "description": "a model"}]}))
    server.on("GET", "/v1/stats", answer({"workers": [{"worker": "w", "active_slots": 3}]}), answer({"workers": []}))
    assert run("models").stdout == "m\t4096\t\ta model\n"
    assert run("stats").stdout.startswith("w\t\t3\t")
    assert "no worker is up" in run("stats").stderr


def test_control_characters_of_a_model_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.cli.show import printable

    assert printable("a\x1b[2Jb") == "a\x1b[2Jb"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert printable("a\x1b[2Jb\n\té\u202e") == "a\ufffd[2Jb\n\té\ufffd"


def test_every_command_has_a_summary_and_help(run) -> None:
    listed = run("--help").stdout
    for name, entry in COMMANDS.items():
        assert entry.summary in listed
        assert run(name, "--help").exit_code == 0


def test_the_version_is_the_packages(run) -> None:
    assert run("--version").stdout == f"slotline {slotline.__version__}\n"
    assert run("version").stdout.startswith(f"slotline {slotline.__version__} (Python ")


def test_an_unknown_command_is_no_traceback(run) -> None:
    result = run("strat")
    assert result.exit_code == 2
    assert "No such command 'strat'" in result.stderr


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (["worker"], ["--model-path (or SLOTLINE_MODEL_PATH) is required"]),
        (["worker", "--model", "m", "--n-ctx", "x", "--top-p", "7"], ["--n-ctx='x': ", "--top-p='7': "]),
        (["web", "--port", "70000"], ["--port='70000': "]),
        (["web", "--redis-url", "here"], ["--redis-url='here': must begin with redis://"]),
    ],
)
def test_a_bad_setting_is_one_line_each_and_status_2(run, args: list[str], lines: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == len(lines)
    for line, expected in zip(result.stderr.splitlines(), lines, strict=True):
        assert line.startswith(f"slotline: {expected}")


def test_a_bad_variable_is_named_as_such(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_PORT", "http")
    assert run("web").stderr.startswith("slotline: SLOTLINE_PORT='http': ")


@pytest.mark.parametrize(
    ("name", "age_s", "status", "said"),
    [
        ("m-{host}-1-a", 0.1, 0, "m-{host}-1-a: well"),
        ("m-elsewhere-1-a", 0.1, 1, "no worker of this host is up"),
        ("m-{host}-1-a", 90.0, 1, "a worker of this host has not moved for 90 s"),
    ],
)
def test_a_worker_can_be_asked_whether_it_is_well(
    run, valkey: str, client, name: str, age_s: float, status: int, said: str
) -> None:
    name, said = (text.replace("{host}", socket.gethostname()) for text in (name, said))
    client.sadd(WORKERS, name)
    Registry(client).report(WorkerStats(name, "m", n_parallel=1, n_batch=1, n_ctx=1, last_tick_age_s=age_s))
    result = run("worker", "--check", "--model", "m", "--redis-url", valkey)
    assert (result.exit_code, said in result.output) == (status, True)


def test_a_worker_whose_redis_is_gone_is_not_well(run) -> None:
    assert run("worker", "--check", "--model", "m", "--redis-url", "redis://127.0.0.1:9/0").exit_code == 69


def start(server: ScriptedServer, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slotline", *args],
        cwd=ROOT,
        env={**os.environ, "SLOTLINE_URL": server.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupted_stream_leaves_the_job_and_says_how_to_go_on(server: ScriptedServer) -> None:
    streaming = threading.Event()

    def hold(handler) -> None:
        streaming.set()
        handler.reader_left()

    server.on("GET", EVENTS, events(STARTED, token(0), hold))
    process = start(server, "submit", "hello", "--stream")
    assert streaming.wait(30)
    assert process.stdout.read(3) == "t0 "
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, "\n")
    assert errors == (
        "slotline: job job1 goes on: follow it with `slotline status job1 --stream`, "
        "end it with `slotline cancel job1`\n"
    )


def test_an_interrupted_question_ends_quietly(server: ScriptedServer) -> None:
    asked = threading.Event()

    def hold(handler) -> None:
        asked.set()
        handler.reader_left()

    server.on("GET", "/v1/stats", hold)
    process = start(server, "stats")
    assert asked.wait(30)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors.strip()) == (130, "", "")


def test_a_reader_of_the_output_that_leaves_is_no_traceback(server: ScriptedServer) -> None:
    server.on("GET", "/v1/jobs/job1", answer(job("running", text="x" * 4_000_000)))
    process = start(server, "status", "job1")
    with process, process.stdout, process.stderr:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=30) == 1
        assert "Traceback" not in process.stderr.read()
