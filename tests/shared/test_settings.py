from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.names import MODEL_NAME
from shared.settings import PREFIX, BatchSettings, Settings, SettingsError, WebSettings, WorkerSettings, load

NUMBER = ["x", "", "1e999", "nan", "-inf"]
FRACTION = [*NUMBER, "-0.1"]
WHOLE = [*NUMBER, "1.5", "0x10"]

#: Bad values of each setting that can have one.
BAD: dict[type[Settings], dict[str, list[Any]]] = {
    Settings: {
        "redis_url": [
            "",
            "localhost:6379",
            "http://h",
            "redis:/h",
            "redis://h:port",
            "redis://h:65536",
            "redis://[::1",
        ],
        "redis_timeout_s": [*FRACTION, "0"],
        "redis_wait_s": ["x", "nan", "-0.1"],
        "redis_wait_replicas": [*WHOLE, "-1"],
        "result_ttl_s": [*WHOLE, "0", "-1"],
        "failure_ttl_s": [*WHOLE, "0", "-1"],
        "timeout_s": [*FRACTION, "0"],
        "max_tokens": [*WHOLE, "0", "-1"],
        "max_tokens_cap": [*WHOLE, "-1"],
        "file_ttl_s": [*WHOLE, "0", "-1"],
        "log_level": ["", "LOUD", "debug"],
    },
    WebSettings: {
        "port": [*WHOLE, "-1", "65536"],
        "web_workers": [*WHOLE, "0", "65"],
        "max_body_bytes": [*WHOLE, "0", "-1"],
        "max_streams": [*WHOLE, "0", "-1"],
        "keep_alive_s": [*FRACTION, "0"],
        "max_wait_s": [*FRACTION, "0"],
        "ask_timeout_s": [*FRACTION, "0"],
        "idempotency_ttl_s": [*WHOLE, "0", "-1"],
        "bound_lease_s": [*FRACTION, "0"],
        "max_file_bytes": [*WHOLE, "0", "-1"],
        "webhook_secret": ["secret", "whsec_", "whsec_c2hvcnQ=", "whsec_%"],
        "webhook_allow_private": ["maybe", "2"],
        "webhook_timeout_s": [*FRACTION, "0", "61"],
        "webhook_backoff_s": [*FRACTION, "0"],
        "webhook_retry_s": FRACTION,
        "webhook_senders": [*WHOLE, "0", "257"],
    },
    BatchSettings: {
        "batch_max_lines": [*WHOLE, "0", "-1"],
        "batch_max_line_bytes": [*WHOLE, "0", "-1"],
        "batch_part_lines": [*WHOLE, "0", "-1", "1001"],
        "batch_part_s": ["x", "nan", "0", "-1", "5.1"],
        "batch_window": [*WHOLE, "-1"],
        "batch_lease_s": [*FRACTION, "0"],
        "batches_at_once": [*WHOLE, "0", "257"],
    },
    WorkerSettings: {
        "name": ["a b", "a:b", "/a", "é", "a" * 129, "default"],
        "alias": ["a b", "a:b", "/a", "é", "a" * 129, "default"],
        "n_gpu_layers": [*WHOLE, "-2"],
        "n_ctx": [*WHOLE, "-1"],
        "n_parallel": [*WHOLE, "0", "257", "Auto", "automatic"],
        "n_batch": [*WHOLE, "-1", "3"],
        "n_ubatch": [*WHOLE, "0"],
        "chunk_size": [*WHOLE, "0"],
        "max_queue": [*WHOLE, "-1"],
        "cache_prompt": ["", "maybe", "2"],
        "kv_unified": ["", "maybe", "true"],
        "cached_prefixes": [*WHOLE, "-1", "256"],
        "itl_target_ms": [*FRACTION, "0", "60001"],
        "threads": [*WHOLE, "-1"],
        "threads_batch": [*WHOLE, "-1"],
        "main_gpu": [*WHOLE, "-1"],
        "split_mode": ["", "rows"],
        "tensor_split": ["x", "3;1", "3,-1", "nan,1", "1,inf"],
        "use_mlock": ["", "maybe", "2"],
        "cache_type_k": ["", "q3"],
        "cache_type_v": ["", "q3"],
        "flash_attn": ["", "yes"],
        "pooling": ["", "max", "Mean"],
        "temp": [*FRACTION, "10.1"],
        "top_k": [*WHOLE, "-1"],
        "top_p": [*FRACTION, "0", "1.1"],
        "min_p": [*FRACTION, "1.1"],
        "seed": [*WHOLE, "-2", str(2**63)],
        "penalty_repeat": [*FRACTION, "0", "10.1"],
        "penalty_freq": [*NUMBER, "-2.1", "2.1"],
        "penalty_present": [*NUMBER, "-2.1", "2.1"],
        "grammar_root": [""],
        "flush_s": ["x", "nan", "-0.1", "2"],
        "drain_s": ["x", "nan", "-0.1"],
        "pause_s": ["x", "nan", "-0.1"],
        "age_s": [*FRACTION, "0"],
        "lease_s": [*FRACTION, "0"],
        "stall_timeout_s": ["x", "nan", "-0.1"],
    },
}
#: Any text will do here; whether there is such a file or class is found out when it is used.
ANY_TEXT = {"host", "files_url", "model_path", "chat_template", "batch_strategy", "grammar"}
CASES = [(cls, field, value) for cls, fields in BAD.items() for field, values in fields.items() for value in values]


@pytest.fixture(autouse=True)
def no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith(PREFIX)]:
        monkeypatch.delenv(name)


def required(cls: type[Settings], field: str) -> dict[str, str]:
    """What else must be given."""
    return {"model_path": "fake:echo"} if issubclass(cls, WorkerSettings) and field != "model_path" else {}


@pytest.mark.parametrize(("cls", "field", "value"), CASES)
def test_a_bad_flag_is_named_with_what_is_wrong(cls: type[Settings], field: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(cls, {**required(cls, field), field: value})
    (line,) = str(caught.value).splitlines()
    assert f"--{field.replace('_', '-')}" in line or field == "n_batch" and "n_batch 3 is below n_parallel 4" in line
    assert len(line) > len(field) + len(value) + 10


@pytest.mark.parametrize(("cls", "field", "value"), [case for case in CASES if case[2] != ""])
def test_a_bad_variable_is_named_with_what_is_wrong(
    cls: type[Settings], field: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFIX + field.upper(), value)
    with pytest.raises(SettingsError) as caught:
        load(cls, required(cls, field))
    (line,) = str(caught.value).splitlines()
    assert PREFIX + field.upper() in line or field == "n_batch" and "n_batch 3 is below n_parallel 4" in line


def test_every_setting_has_a_bad_value_or_takes_any_text() -> None:
    for cls, fields in BAD.items():
        own = set(cls.model_fields) - (set() if cls is Settings else set(Settings.model_fields))
        assert own - ANY_TEXT == set(fields)


def test_each_bad_value_gets_a_line() -> None:
    with pytest.raises(SettingsError) as caught:
        load(WebSettings, {"port": "x", "web_workers": 0})
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["--port", "--web-workers"]


def test_a_missing_model_is_asked_for_by_flag_and_variable() -> None:
    with pytest.raises(SettingsError, match=r"--model-path \(or SLOTLINE_MODEL_PATH\) is required"):
        load(WorkerSettings)


def test_the_password_of_a_bad_redis_url_is_not_shown() -> None:
    with pytest.raises(SettingsError, match="--redis-url") as caught:
        load(Settings, {"redis_url": "http://user:secret@h/0"})
    assert "secret" not in str(caught.value)


def test_a_secret_is_not_shown_even_where_it_is_wrong() -> None:
    with pytest.raises(SettingsError, match="--webhook-secret") as caught:
        load(WebSettings, {"webhook_secret": "whsec_hidden"})
    assert "hidden" not in str(caught.value)
    good = "whsec_" + "A" * 32
    assert good not in repr(load(WebSettings, {"webhook_secret": good}))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("rediss://u:p@h", "rediss://u:p@h"),
        ("valkey://h:1/2", "redis://h:1/2"),
        ("valkeys://u:p@h", "rediss://u:p@h"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("redis://[::1]:7", "redis://[::1]:7"),
    ],
)
def test_redis_and_valkey_urls_are_taken(given: str, kept: str) -> None:
    assert load(Settings, {"redis_url": given}).redis_url == kept


def test_what_is_given_beats_the_variable_and_none_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_MAX_TOKENS", "7")
    assert load(Settings).max_tokens == 7
    assert load(Settings, {"max_tokens": None}).max_tokens == 7
    assert load(Settings, {"max_tokens": 9}).max_tokens == 9


def test_a_bad_variable_does_not_matter_where_a_good_flag_beats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_MAX_TOKENS", "x")
    assert load(Settings, {"max_tokens": 9}).max_tokens == 9


def test_what_is_said_otherwise_counts_only_for_what_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_MAX_TOKENS", "7")
    monkeypatch.setenv("SLOTLINE_REDIS_WAIT_S", "")
    settings = load(
        Settings,
        {"timeout_s": 5, "failure_ttl_s": None},
        otherwise={"max_tokens": 8, "timeout_s": 6, "failure_ttl_s": 60, "redis_wait_s": 9},
    )
    assert (settings.max_tokens, settings.timeout_s) == (7, 5)
    assert (settings.failure_ttl_s, settings.redis_wait_s) == (60, 9)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_MAX_TOKENS", "")
    assert load(Settings).max_tokens == 256


def test_variables_of_the_other_side_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_PORT", "x")
    monkeypatch.setenv("SLOTLINE_URL", "http://h")
    assert load(WorkerSettings, {"model_path": "fake:echo"}).model_fields_set == {"model_path"}


def test_settings_do_not_change_once_built() -> None:
    settings = load(Settings)
    with pytest.raises(ValidationError):
        settings.max_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"n_batch": 3, "n_parallel": 4}, "n_batch 3 is below n_parallel 4"),
        ({"n_ctx": 3, "n_parallel": 4}, "n_batch 3 is below n_parallel 4"),
        ({"n_ctx": 8192, "n_batch": 16, "n_parallel": 17}, "n_batch 16 is below n_parallel 17"),
    ],
)
def test_a_batch_that_cannot_hold_a_token_of_each_slot_is_refused(given: dict[str, int], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load(WorkerSettings, {"model_path": "fake:echo", **given})


def test_a_batch_of_one_token_for_each_slot_is_enough() -> None:
    assert load(WorkerSettings, {"model_path": "fake:echo", "n_batch": 4, "n_parallel": 4}).batch_tokens == 4


def test_slots_and_context_may_be_left_to_the_model() -> None:
    settings = load(WorkerSettings, {"model_path": "m.gguf", "n_ctx": "0", "n_parallel": "auto"})
    assert (settings.n_ctx, settings.n_parallel, settings.batch_tokens) == (0, "auto", 0)
    assert load(WorkerSettings, {"model_path": "m.gguf", "n_ctx": 0, "n_parallel": 256}).n_parallel == 256
    assert load(WorkerSettings, {"model_path": "m.gguf", "n_batch": 1, "n_parallel": "auto"}).batch_tokens == 1


def test_a_bad_number_of_slots_is_told_what_it_may_be() -> None:
    with pytest.raises(SettingsError, match=r"^--n-parallel='many': must be a number from 1 to 256, or auto$"):
        load(WorkerSettings, {"model_path": "m.gguf", "n_parallel": "many"})


def test_n_batch_left_out_is_n_ctx() -> None:
    assert load(WorkerSettings, {"model_path": "fake:echo", "n_ctx": 1234}).batch_tokens == 1234


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/SmolLM2-135M.Q8_0.gguf", "SmolLM2-135M.Q8_0"),
        ("my model (v2).gguf", "my-model--v2-"),
        ("a:b.gguf", "a-b"),
        ("modèle.gguf", "mod-le"),
        ("_-.+x.gguf", "x"),
        (".gguf", "gguf"),
        ("___.gguf", "model"),
        ("模型.gguf", "model"),
        ("", "model"),
        ("fake:echo", "fake-echo"),
        ("noext", "noext"),
    ],
)
def test_the_model_is_named_after_its_file(path: str, name: str) -> None:
    assert load(WorkerSettings, {"model_path": path}).model_name == name


@given(st.text(st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), max_size=100))
def test_any_file_name_gives_a_usable_model_name(stem: str) -> None:
    if stem != "default":
        assert MODEL_NAME.fullmatch(load(WorkerSettings, {"model_path": f"/m/{stem}.gguf"}).model_name)


@pytest.mark.parametrize("path", ["default.gguf", "x" * 129 + ".gguf"])
def test_a_file_name_that_gives_no_usable_name_asks_for_one(path: str) -> None:
    with pytest.raises(SettingsError, match=r"--name \(or SLOTLINE_NAME\)"):
        load(WorkerSettings, {"model_path": path})
    assert load(WorkerSettings, {"model_path": path, "name": "m"}).model_name == "m"


def test_the_name_given_beats_the_file_name() -> None:
    assert load(WorkerSettings, {"model_path": "a.gguf", "name": "org/b-1.2+x"}).model_name == "org/b-1.2+x"


def test_the_defaults_are_the_documented_ones() -> None:
    settings = load(WorkerSettings, {"model_path": "m.gguf"})
    documented = {
        "n_gpu_layers": 99, "n_ctx": 8192, "n_parallel": 4, "n_ubatch": 512, "chunk_size": 512, "max_queue": 0,
        "cache_prompt": False, "batch_strategy": "decode_maximal", "kv_unified": "auto", "flush_s": 0.03,
        "drain_s": 20.0,
        "result_ttl_s": 86_400, "failure_ttl_s": 604_800, "max_tokens": 256, "timeout_s": 600.0, "redis_wait_s": 30.0,
    }  # fmt: skip
    assert {field: getattr(settings, field) for field in documented} == documented
    assert settings.batch_tokens == 8192
