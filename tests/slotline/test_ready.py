from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from slotline.up import ready
from slotline.up.ready import Readiness, commands, room
from tests.slotline.scripted import Handler, ScriptedServer, answer, error


def test_each_phase_is_told_once_until_all_is_there(server: ScriptedServer) -> None:
    no_worker = answer(error(503, "no_worker", "no worker is live"), 503)
    no_redis = answer(error(503, "redis_unavailable", "Redis does not answer"), 503)
    server.on("GET", "/readyz", Handler.drop, no_redis, no_worker, no_worker, answer({"status": "ready"}))
    said: list[str] = []
    readiness = Readiness(server.url, said.append)
    assert [readiness.look() for _ in range(5)] == [False, False, False, False, True]
    assert said == ["starting the web API ...", "waiting for Redis ...", "loading the model ..."]


def test_a_phase_that_lasts_is_told_again(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "REMIND_S", 0.0)
    server.on("GET", "/readyz", answer(error(503, "no_worker", "no worker is live"), 503))
    said: list[str] = []
    readiness = Readiness(server.url, said.append)
    readiness.look()
    readiness.look()
    assert said[0] == "loading the model ..."
    assert re.fullmatch(r"still loading the model \(\d+ s\) \.\.\.", said[1])


def test_the_room_is_what_the_worker_says(server: ScriptedServer) -> None:
    server.on("GET", "/v1/stats", answer({"workers": [{"n_parallel": 16, "n_ctx": 8192}]}))
    assert room(server.url) == " in 16 slots, n_ctx 8192"


@pytest.mark.parametrize(
    "said", [Handler.drop, answer({"workers": []}), answer(error(503, "redis_unavailable", "no Redis"), 503)]
)
def test_without_a_worker_nothing_is_said_of_its_room(server: ScriptedServer, said: object) -> None:
    server.on("GET", "/v1/stats", said)
    assert room(server.url) == ""


@pytest.mark.parametrize("name", ["slotline", "__main__.py"])
def test_the_commands_can_be_pasted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"/opt/x/bin/{name}"])
    text = commands("http://127.0.0.1:8000")
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    for line in lines:
        shlex.split(line)
    assert lines[2] == "curl -sN http://127.0.0.1:8000/v1/jobs/$JOB/events"
    program = "/opt/x/bin/slotline" if name == "slotline" else f"{sys.executable} -m slotline"
    assert lines[3].startswith(f"{program} submit --stream ")


def test_the_batch_command_runs_on_the_file_that_comes_with_us() -> None:
    line = next(line for line in commands("http://127.0.0.1:8000").splitlines() if " batch run " in line)
    words = shlex.split(line)
    source = words[words.index("run") + 1]
    prompts = [json.loads(text) for text in Path(source).read_text().splitlines()]
    assert len(prompts) > 3
    assert all(prompt["messages"][0]["content"] for prompt in prompts)
    assert words[words.index("-o") + 1] == "answers.jsonl"
