from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slotline.cli.faults import BadSetup
from slotline.up import plan as plans
from slotline.up.plan import Plan, free_port, make_plan


def plan(**given) -> Plan:
    flags = dict.fromkeys(("host", "port", "model", "slots", "redis_url", "directory")) | {"fresh": False}
    return make_plan(**flags | {"model": "fake:echo"} | given)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "REDIS_URL", "MODEL_PATH", "N_CTX", "N_PARALLEL", "CACHE_PROMPT", "FILES_URL"):
        monkeypatch.delenv(f"SLOTLINE_{name}", raising=False)


def test_left_alone_it_is_the_demo_model_sized_to_the_machine_with_cached_prompts(own_home: Path) -> None:
    made = plan(model=None)
    assert (made.demo, made.own_redis, made.fresh) == (True, True, False)
    assert (made.worker.n_parallel, made.worker.n_ctx, made.worker.cache_prompt) == ("auto", 0, True)
    assert (made.web.host, made.web.port, made.directory) == ("127.0.0.1", 8000, own_home)


def test_flags_go_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_N_PARALLEL", "2")
    monkeypatch.setenv("SLOTLINE_PORT", "9000")
    monkeypatch.setenv("SLOTLINE_MODEL_PATH", "fake:count")
    assert (plan(model=None).worker.n_parallel, plan(model=None).web.port) == (2, 9000)
    assert (plan(model=None).worker.model_path, plan(model=None).demo) == ("fake:count", False)
    assert plan(slots="8", port="1234").worker.n_parallel == 8


def test_a_context_of_the_variable_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_N_CTX", "2048")
    assert plan().environment(1, "m", "redis://x")["SLOTLINE_N_CTX"] == "2048"


def test_prompts_are_not_cached_if_the_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE_PROMPT", "false")
    assert plan().worker.cache_prompt is False
    assert plan().environment(1, "m", "redis://x")["SLOTLINE_CACHE_PROMPT"] == "false"


def test_a_redis_that_is_given_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(redis_url="redis://there:1/0").own_redis is False
    monkeypatch.setenv("SLOTLINE_REDIS_URL", "redis://there:2/0")
    made = plan()
    assert (made.own_redis, made.web.redis_url, made.worker.redis_url) == (False, *["redis://there:2/0"] * 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": "0"}, "--slots='0': "),
        ({"slots": "many"}, "--slots='many': "),
        ({"port": "x"}, "--port='x': "),
        ({"redis_url": "here"}, "--redis-url='here': "),
        ({"fresh": True, "redis_url": "redis://x"}, "--fresh empties only a server of our own"),
        ({"model": None, "slots": "999"}, "--slots='999': "),
    ],
)
def test_what_is_wrong_is_named_by_the_flag(given: dict, message: str) -> None:
    with pytest.raises(BadSetup) as caught:
        plan(**given)
    assert caught.value.message.startswith(message)
    assert caught.value.exit_code == 2


def test_a_real_model_needs_its_library_and_the_scripted_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "find_spec", lambda name: None)
    assert plan().worker.model_path == "fake:echo"
    with pytest.raises(BadSetup, match=r"pip install 'slotline\[demo\]'"):
        plan(model="m.gguf")


def test_the_children_are_told_by_variables() -> None:
    env = plan(slots="2").environment(1234, "m.gguf", "redis://127.0.0.1:5/0")
    assert env["SLOTLINE_PORT"] == "1234"
    assert env["SLOTLINE_MODEL_PATH"] == "m.gguf"
    assert env["SLOTLINE_REDIS_URL"] == "redis://127.0.0.1:5/0"
    assert (env["SLOTLINE_N_PARALLEL"], env["SLOTLINE_N_CTX"]) == ("2", "0")
    assert plan(slots="auto").environment(1, "m", "redis://x")["SLOTLINE_N_PARALLEL"] == "auto"


def test_files_are_in_the_data_directory_unless_they_are_elsewhere(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan().environment(1, "m", "redis://x")["SLOTLINE_FILES_URL"] == str(own_home / "files")
    assert plan().own_files == own_home / "files"
    monkeypatch.setenv("SLOTLINE_FILES_URL", "s3://bucket/here")
    assert plan().environment(1, "m", "redis://x")["SLOTLINE_FILES_URL"] == "s3://bucket/here"
    assert plan().own_files is None


def test_a_bad_setting_of_the_batches_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_BATCH_WINDOW", "wide")
    with pytest.raises(BadSetup, match="SLOTLINE_BATCH_WINDOW='wide': "):
        plan()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("[::1]", "http://[::1]:5"),
        ("box.lan", "http://box.lan:5"),
    ],
)
def test_the_url_is_one_to_type(host: str, url: str) -> None:
    assert plan(host=host).url(5) == url


def test_a_port_that_is_taken_is_refused_with_advice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadSetup, match=f"port {port} of 127.0.0.1 is taken: stop what listens there, or .* --port"):
            free_port("127.0.0.1", port)
    assert free_port("127.0.0.1", port) == port


def test_port_0_is_any_free_one() -> None:
    assert free_port("127.0.0.1", 0) > 1023


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(BadSetup, match=host):
        free_port(host, 0)
