"""The commands of `slotline batch` against a scripted server."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shared.schemas import GenerationRequest
from slotline.cli import cli
from slotline.cli.generation import OF_THE_ANSWER, _options
from tests.slotline.scripted import Handler, ScriptedServer, answer, error, job

Run = Callable[..., Result]

BATCH: dict[str, Any] = {
    "id": "batch_1",
    "status": "completed",
    "paused": False,
    "endpoint": "/v1/completions",
    "model": "m",
    "created_at": 1_700_000_000,
    "expires_at": 1_700_600_000,
    "output_file_id": "file_out",
    "error_file_id": "file_err",
    "errors": None,
    "request_counts": {"total": 3, "completed": 3, "failed": 0},
}


@pytest.fixture
def api(server: ScriptedServer) -> ScriptedServer:
    server._replies.clear()
    server.on("GET", "/v1/models", answer({"data": [{"id": "m", "live_workers": 1}]}))
    server.on("GET", "/v1/stats", answer({"workers": [{"model": "m", "n_parallel": 2}]}))
    server.on("POST", "/v1/jobs", answer_job)
    server.on("POST", "/v1/files", answer({"id": "file_1"}))
    server.on("POST", "/v1/batches", answer(BATCH))
    server.on("GET", "/v1/batches/batch_1", answer(BATCH))
    server.on("GET", "/v1/files/file_out/content", answer('{"custom_id": "a"}\n', content_type="application/jsonl"))
    server.on("GET", "/v1/files/file_err/content", answer('{"custom_id": "b"}\n', content_type="application/jsonl"))
    return server


def answer_job(handler: Handler) -> None:
    body = handler.body
    if body.get("prompt") == "bad":
        answer(error(400, "invalid_request", "no", "prompt"), 400)(handler)
    else:
        answer(job(id=body["id"], text=json.dumps(body.get("prompt") or body.get("messages"))))(handler)


@pytest.fixture
def batch(api: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `slotline batch …` in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def invoke(*args: str, stdin: str | None = None) -> Result:
        monkeypatch.setattr("sys.argv", ["slotline", "batch", *args])
        given = [*args, "--url", api.url] if args[0] not in ("keep",) and "--help" not in args else [*args]
        return CliRunner().invoke(cli, ["batch", *given], input=stdin)

    return invoke


def wrote(name: str, *lines: Any) -> str:
    Path(name).write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return name


def rows(name: str = "out.jsonl") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [json.loads(line) for line in Path(name).read_text().splitlines()]
    return sorted(found, key=lambda row: row["line"])


def sent(api: ScriptedServer) -> list[dict[str, Any]]:
    unsaid = ("id", "model", "priority", "result_ttl_s", "seed")
    bodies = [asked.body for asked in api.asked_for("/v1/jobs") if asked.body["priority"] == "batch"]
    return [{name: value for name, value in body.items() if name not in unsaid} for body in bodies]


def test_a_template_over_csv(batch: Run, api: ScriptedServer) -> None:
    wrote("in.csv", "text,label", "so good,1", "so bad,0")
    done = batch(
        "run", "in.csv", "-o", "out.jsonl", "--template", "Classify {{x}}: {text}", "--max-tokens", "5", "--stop", "."
    )
    assert done.exit_code == 0, done.stderr
    assert {body["prompt"] for body in sent(api)} == {"Classify {x}: so good", "Classify {x}: so bad"}
    assert all(body["max_tokens"] == 5 and body["stop"] == ["."] for body in sent(api))
    assert rows()[0] == {
        "input_text": "so good",
        "label": "1",
        "line": 2,
        "text": '"Classify {x}: so good"',
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 0},
        "error": None,
    }


def test_a_schema_and_a_system_message(batch: Run, api: ScriptedServer) -> None:
    wrote("in.jsonl", {"prompt": "a"})
    wrote("answer.json", {"type": "object"})
    done = batch("run", "in.jsonl", "-o", "out.jsonl", "--schema", "answer.json", "--system", "be short")
    assert done.exit_code == 0, done.stderr
    assert sent(api) == [
        {
            "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        }
    ]


def test_some_that_fail_end_with_1_and_tell_the_command_that_runs_them_again(batch: Run) -> None:
    wrote("in.jsonl", {"prompt": "a"}, {"prompt": "bad"})
    done = batch("run", "in.jsonl", "-o", "out.jsonl", "--errors", "errors.jsonl", "--overwrite")
    assert done.exit_code == 1
    assert "slotline batch run in.jsonl -o out.jsonl --errors errors.jsonl\n" in done.stderr
    assert [row["line"] for row in rows("errors.jsonl")] == [2]


def test_too_many_failures_end_with_3(batch: Run) -> None:
    wrote("in.jsonl", *[{"prompt": "bad"}] * 30)
    done = batch("run", "in.jsonl", "-o", "out.jsonl", "--max-failures", "4", "--concurrency", "1")
    assert done.exit_code == 3
    assert "stopped early: 5 lines have failed, more than --max-failures 4 allows" in done.stderr


def test_broken_input_ends_with_2_and_the_numbers_of_the_lines(batch: Run, api: ScriptedServer) -> None:
    wrote("in.jsonl", {"prompt": "a"}, "{", {"x": 1})
    done = batch("run", "in.jsonl", "-o", "out.jsonl")
    assert done.exit_code == 2
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == ["line 2", "line 3"]
    assert sent(api) == []
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-o", "out.jsonl.gz"], "rows are written as JSONL"),
        (["-o", "in.jsonl"], "have to be different files"),
        (["-o", "out.jsonl", "--errors", "./out.jsonl"], "-o and --errors have to be different files"),
        (["-o", "nowhere/out.jsonl"], "-o nowhere/out.jsonl: its folder does not exist"),
        (["-o", "out.jsonl", "--errors", "nowhere/e"], "--errors nowhere/e: its folder does not exist"),
        (["-o", "out.jsonl", "--errors", "-"], "--errors -: has to be a file"),
        (["-o", "/dev/null"], "-o /dev/null: is not a plain file"),
        (["-o", "out.jsonl", "--errors", "out.jsonl.manifest.json"], "have to be different files"),
        (["-o", "."], "is a folder"),
        (["-o", "out.jsonl", "--max-failures", "x"], "not a number of lines"),
        (["-o", "out.jsonl", "--template", "{"], "--template"),
        (["-o", "out.jsonl", "--schema", "in.jsonl", "--grammar", "x"], "--schema or --grammar"),
        (["-o", "out.jsonl", "--schema", "none.json"], "none.json"),
        (["-o", "out.jsonl", "--model", "gpt"], "no model 'gpt'"),
        (["-o", "out.jsonl", "--slots", "2"], "--slots is for a worker of our own"),
        (["-o", "out.jsonl", "--limit", "0"], "--limit"),
    ],
)
def test_bad_usage_ends_with_2(batch: Run, api: ScriptedServer, args: list[str], told: str) -> None:
    wrote("in.jsonl", {"prompt": "a"})
    done = batch("run", "in.jsonl", *args)
    assert done.exit_code == 2
    assert told in done.stderr
    assert sent(api) == []


@pytest.mark.parametrize("ending", ["manifest.json", "unsorted", "new"])
def test_the_input_is_none_of_the_files_beside_the_output(batch: Run, ending: str) -> None:
    name = wrote(f"out.jsonl.{ending}", {"prompt": "a"})
    done = batch("run", name, "-o", "out.jsonl", "--overwrite")
    assert done.exit_code == 2
    assert "have to be different files" in done.stderr
    assert Path(name).read_text() == '{"prompt": "a"}\n'


def test_an_option_that_is_refused_is_told_before_a_line_is_run(batch: Run, api: ScriptedServer) -> None:
    def refuse(handler: Handler) -> None:
        param = "response_format.json_schema.schema.x"
        answer(error(400, "unsupported_schema", f"{param}: `x` is not enforced", param), 400)(handler)

    api._replies["POST", "/v1/jobs"].clear()
    api.on("POST", "/v1/jobs", refuse)
    wrote("in.jsonl", {"prompt": "a"})
    wrote("answer.json", '\ufeff{"x": 1}')
    done = batch("run", "in.jsonl", "-o", "out.jsonl", "--schema", "answer.json")
    assert done.exit_code == 2
    assert (
        "the options of the command cannot be served: response_format.json_schema.schema.x: `x` is not" in done.stderr
    )
    assert sent(api) == []
    assert not Path("out.jsonl").exists()


def test_an_output_that_nobody_reads_stops_the_run(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **named: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("slotline.batch.writing.Output.write", broken)
    wrote("in.jsonl", {"prompt": "a"})
    done = batch("run", "in.jsonl", "-o", "-")
    assert done.exit_code == 3
    assert done.stderr.splitlines()[-1] == "slotline: stopped early: nobody reads the output any more"


def test_a_full_disk_stops_the_run_and_tells_how_to_go_on(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("slotline.batch.writing.Output.write", full)
    wrote("in.jsonl", {"prompt": "a"})
    done = batch("run", "in.jsonl", "-o", "out.jsonl")
    assert done.exit_code == 3
    assert "No space left" in done.stderr
    assert "to go on: " in done.stderr.splitlines()[-1]


def test_a_link_to_the_output_stays_one(batch: Run) -> None:
    wrote("in.jsonl", {"prompt": "a"})
    Path("link.jsonl").symlink_to("out.jsonl")
    done = batch("run", "in.jsonl", "-o", "link.jsonl", "--order", "input")
    assert done.exit_code == 0, done.stderr
    assert Path("link.jsonl").is_symlink()
    assert [row["line"] for row in rows("out.jsonl")] == [1]


def test_a_dry_run_writes_nothing(batch: Run, api: ScriptedServer, tmp_path: Path) -> None:
    api.on("POST", "/v1/tokenize", answer({"tokens": [1, 2]}))
    wrote("in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    done = batch("run", "in.jsonl", "-o", "out.jsonl", "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert "prompt tokens  4" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".jsonl"] == ["in.jsonl"]


def uploaded(api: ScriptedServer) -> list[str]:
    return [asked.body.decode() for asked in api.asked_for("/v1/files")]


def test_submit_uploads_openai_lines_and_prints_the_id(batch: Run, api: ScriptedServer) -> None:
    wrote("in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    done = batch("submit", "in.jsonl", "--max-tokens", "5", "--seed", "-1", "--model", "m")
    assert (done.exit_code, done.stdout) == (0, "batch_1\n"), done.stderr
    (content,) = uploaded(api)
    assert 'filename="in.jsonl.1.jsonl"' in content
    body = {"max_tokens": 5, "prompt": "a", "model": "m"}
    line = {"custom_id": "line-1", "method": "POST", "url": "/v1/completions", "body": body}
    assert json.dumps(line) in content
    assert api.asked_for("/v1/batches")[0].body == {
        "input_file_id": "file_1",
        "endpoint": "/v1/completions",
        "completion_window": "7d",
        "metadata": {"source": "in.jsonl"},
    }


def test_submit_splits_what_exceeds_the_limits(batch: Run, api: ScriptedServer) -> None:
    wrote("in.jsonl", *({"prompt": f"p{n}"} for n in range(5)))
    done = batch("submit", "in.jsonl", "--max-lines", "2")
    assert done.stdout.splitlines() == ["batch_1"] * 3
    assert [content.count("custom_id") for content in uploaded(api)] == [2, 2, 1]


def test_submit_refuses_broken_input_and_another_endpoint_before_anything_is_uploaded(
    batch: Run, api: ScriptedServer
) -> None:
    wrote("in.jsonl", {"prompt": "a"}, "x")
    assert "line 2: not JSON" in batch("submit", "in.jsonl").stderr
    wrote("in.jsonl", {"prompt": "a"})
    done = batch("submit", "in.jsonl", "--endpoint", "/v1/embeddings")
    assert done.exit_code == 2
    assert "line 1: is for /v1/completions, not for --endpoint /v1/embeddings" in done.stderr
    assert uploaded(api) == []


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (1, 1)])
def test_submit_can_wait_for_the_end(
    batch: Run, api: ScriptedServer, monkeypatch: pytest.MonkeyPatch, failed: int, status: int
) -> None:
    monkeypatch.setattr("slotline.cli.batch_server.ASK_S", 0.0)
    api._replies["GET", "/v1/batches/batch_1"].clear()
    counts = {"total": 3, "completed": 3 - failed, "failed": failed}
    api.on(
        "GET",
        "/v1/batches/batch_1",
        answer({**BATCH, "status": "validating"}),
        answer({**BATCH, "status": "in_progress"}),
        answer({**BATCH, "request_counts": counts}),
    )
    wrote("in.jsonl", {"prompt": "a"})
    done = batch("submit", "in.jsonl", "--wait")
    assert done.exit_code == status
    assert f"batch_1\tcompleted\t{3 - failed} answered and {failed} failed of 3" in done.stdout


def test_ids_are_told_at_once_so_that_a_later_failure_loses_none(batch: Run, api: ScriptedServer) -> None:
    api._replies["POST", "/v1/batches"].clear()
    api.on("POST", "/v1/batches", answer(BATCH), answer(error(400, "invalid_request", "no room"), 400))
    wrote("in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    done = batch("submit", "in.jsonl", "--max-lines", "1", "--wait")
    assert done.exit_code == 1
    assert (done.stdout, done.stderr.splitlines()[0]) == ("", "batch_1")


def test_a_batch_that_fails_as_a_whole_says_why_after_the_wait(batch: Run, api: ScriptedServer) -> None:
    api._replies["GET", "/v1/batches/batch_1"].clear()
    errors = {"data": [{"line": None, "code": "model_not_found", "message": "no such model", "param": None}]}
    api.on("GET", "/v1/batches/batch_1", answer({**BATCH, "status": "failed", "errors": errors}))
    wrote("in.jsonl", {"prompt": "a"})
    done = batch("submit", "in.jsonl", "--wait")
    assert done.exit_code == 1
    assert "no such model (model_not_found)" in done.stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-o", "nowhere/out.jsonl"], "its folder does not exist"),
        (["-o", "a", "--errors", "./a"], "have to be different files"),
        (["-o", "/dev/null"], "is not a plain file"),
    ],
)
def test_a_download_to_where_no_file_can_be_is_bad_usage(
    batch: Run, api: ScriptedServer, args: list[str], told: str
) -> None:
    done = batch("download", "batch_1", *args)
    assert done.exit_code == 2
    assert told in done.stderr
    assert api.asked_for("/v1/batches/batch_1") == []


def test_status_shows_the_batch_and_why_it_failed(batch: Run, api: ScriptedServer) -> None:
    api._replies["GET", "/v1/batches/batch_1"].clear()
    errors = {"data": [{"line": 3, "code": "duplicate_custom_id", "message": "twice", "param": None}]}
    api.on("GET", "/v1/batches/batch_1", answer({**BATCH, "status": "failed", "errors": errors}))
    done = batch("status", "batch_1")
    assert "status\tfailed" in done.stdout
    assert "lines\t3 answered and 0 failed of 3" in done.stdout
    assert "line 3: twice (duplicate_custom_id)" in done.stderr
    assert json.loads(batch("status", "batch_1", "--json").stdout)["id"] == "batch_1"


def test_status_can_wait_for_the_end(batch: Run, api: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotline.cli.batch_server.ASK_S", 0.0)
    api._replies["GET", "/v1/batches/batch_1"].clear()
    counts = {"total": 3, "completed": 2, "failed": 1}
    running = {**BATCH, "status": "in_progress"}
    api.on("GET", "/v1/batches/batch_1", answer(running), answer({**BATCH, "request_counts": counts}))
    done = batch("status", "batch_1", "--wait")
    assert done.exit_code == 1
    assert "status\tcompleted" in done.stdout
    assert "not every line was served" in done.stderr


@pytest.mark.parametrize("name", ["cancel", "pause", "resume", "retry"])
def test_what_can_be_done_with_a_batch(batch: Run, api: ScriptedServer, name: str) -> None:
    api.on("POST", f"/v1/batches/batch_1/{name}", answer({**BATCH, "status": "in_progress", "paused": name == "pause"}))
    done = batch(name, "batch_1")
    assert done.exit_code == 0, done.stderr
    assert ("(paused)" in done.stdout) is (name == "pause")
    assert len(api.asked_for(f"/v1/batches/batch_1/{name}")) == 1


def test_a_batch_that_is_not_there_is_one_line(batch: Run, api: ScriptedServer) -> None:
    api.on("GET", "/v1/batches/none", answer(error(404, "batch_not_found", "there is no batch 'none'"), 404))
    done = batch("status", "none")
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)


def test_download_fetches_both_files_into_one_or_two(batch: Run) -> None:
    assert batch("download", "batch_1", "-o", "out.jsonl").exit_code == 0
    assert Path("out.jsonl").read_text() == '{"custom_id": "a"}\n{"custom_id": "b"}\n'
    assert batch("download", "batch_1", "-o", "out.jsonl", "--errors", "err.jsonl").exit_code == 0
    assert Path("out.jsonl").read_text() == '{"custom_id": "a"}\n'
    assert Path("err.jsonl").read_text() == '{"custom_id": "b"}\n'
    assert batch("download", "batch_1", "-o", "-").stdout == '{"custom_id": "a"}\n{"custom_id": "b"}\n'


def test_a_download_that_breaks_leaves_no_half_file(batch: Run, api: ScriptedServer, tmp_path: Path) -> None:
    api._replies["GET", "/v1/files/file_out/content"].clear()
    api.on("GET", "/v1/files/file_out/content", answer(error(503, "redis_unavailable", "no"), 503))
    assert batch("download", "batch_1", "-o", "out.jsonl").exit_code == 1
    assert list(tmp_path.glob("*.jsonl*")) == []


def test_a_download_of_a_batch_that_still_runs_says_so(batch: Run, api: ScriptedServer) -> None:
    api._replies["GET", "/v1/batches/batch_1"].clear()
    counts = {"total": 9, "completed": 3, "failed": 1}
    running = {**BATCH, "status": "in_progress", "error_file_id": None, "request_counts": counts}
    api.on("GET", "/v1/batches/batch_1", answer(running))
    done = batch("download", "batch_1", "-o", "out.jsonl")
    assert "batch_1 is in_progress: 4 of 9 lines so far" in done.stderr
    assert Path("out.jsonl").read_text() == '{"custom_id": "a"}\n'


def test_what_is_said_of_the_answer_is_a_flag_and_a_field_of_a_job() -> None:
    assert _options().keys() >= OF_THE_ANSWER
    assert GenerationRequest.model_fields.keys() >= OF_THE_ANSWER
