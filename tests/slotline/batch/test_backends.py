from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slotline.batch.backends import Embedded, Server, choose
from slotline.batch.embedded import worker_environment
from slotline.batch.runner import RunnerLost
from tests.slotline.scripted import ScriptedServer, answer


@pytest.fixture
def up(own_home: Path) -> str:
    """A `slotline up` that runs, as far as its state file says."""
    own_home.mkdir()
    (own_home / "up.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:9"}))
    return "http://127.0.0.1:9"


def test_a_named_server_comes_first(up: str) -> None:
    assert choose("http://here", None, None) == Server("http://here", None)
    assert choose("http://here", "m", None) == Server("http://here", "m")


def test_the_variable_names_a_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_URL", "http://there")
    assert choose(None, None, None) == Server("http://there", None)


def test_a_running_up_is_used_and_else_a_worker_of_our_own(own_home: Path) -> None:
    assert choose(None, None, None) == Embedded(None, "auto")
    own_home.mkdir()
    (own_home / "up.json").write_text(json.dumps({"pid": os.getpid()}))
    assert choose(None, "m", None) == Server(None, "m")


@pytest.mark.parametrize("model", ["fake:echo", "m.gguf"])
def test_a_model_file_or_slots_ask_for_a_worker_of_our_own(up: str, model: str) -> None:
    assert choose(None, model, None) == Embedded(model, "auto")
    assert choose(None, None, 3) == Embedded(None, 3)
    assert choose(None, None, "auto") == Embedded(None, "auto")


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(RunnerLost, match="a model file is for a worker of our own"):
        choose("http://here", "m.gguf", None)
    with pytest.raises(RunnerLost, match="--slots is for a worker"):
        choose("http://here", None, 3)
    with pytest.raises(RunnerLost, match="no model file 'm'"):
        choose(None, "m", None)


def test_the_name_of_the_model_is_known_before_a_worker_is_started() -> None:
    assert Embedded("fake:echo", "auto").model_name() == "fake-echo"


def test_a_bad_setting_is_told_before_a_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_N_CTX", "many")
    with pytest.raises(RunnerLost, match="SLOTLINE_N_CTX"):
        Embedded("fake:echo", "auto").model_name()


def test_a_worker_of_our_own_is_sized_to_the_machine_unless_something_else_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("N_PARALLEL", "N_CTX", "FLUSH_S", "CACHE_PROMPT"):
        monkeypatch.delenv(f"SLOTLINE_{name}", raising=False)
    assert worker_environment("fake:echo", "auto") == {
        "SLOTLINE_MODEL_PATH": "fake:echo",
        "SLOTLINE_N_CTX": "0",
        "SLOTLINE_N_PARALLEL": "auto",
        "SLOTLINE_MAX_QUEUE": "0",
        "SLOTLINE_CACHE_PROMPT": "True",
        "SLOTLINE_FLUSH_S": "0.5",
    }
    monkeypatch.setenv("SLOTLINE_N_PARALLEL", "3")
    monkeypatch.setenv("SLOTLINE_N_CTX", "1024")
    monkeypatch.setenv("SLOTLINE_CACHE_PROMPT", "no")
    said = worker_environment("fake:echo", "auto")
    assert [said[f"SLOTLINE_{name}"] for name in ("N_PARALLEL", "N_CTX", "CACHE_PROMPT")] == ["3", "1024", "False"]
    assert worker_environment("fake:echo", 5)["SLOTLINE_N_PARALLEL"] == "5"


def test_a_server_is_asked_for_the_name(server: ScriptedServer) -> None:
    server.on("GET", "/v1/models", answer({"data": [{"id": "m", "alias": "em", "live_workers": 1}]}))
    assert Server(server.url, "em").model_name() == "m"
