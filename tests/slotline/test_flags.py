from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shared.schemas import ChatSpelling, JobRequest
from shared.settings import WebSettings, WorkerSettings
from slotline.cli.flags import settings_options
from slotline.cli.generation import job_body, token_ids
from slotline.cli.submit import submit


def parse(settings: type, *args: str) -> dict:
    given = {}
    command = click.Command("x", callback=given.update, params=settings_options(settings))
    command.main(list(args), standalone_mode=False)
    return given


@pytest.mark.parametrize("settings", [WebSettings, WorkerSettings])
def test_every_setting_is_a_flag_that_is_none_unless_given(settings: type) -> None:
    given = parse(settings)
    assert set(given) == set(settings.model_fields)
    assert set(given.values()) == {None}


@pytest.mark.parametrize("settings", [WebSettings, WorkerSettings])
def test_the_help_names_each_variable_and_default(settings: type) -> None:
    text = click.Command("x", params=settings_options(settings)).get_help(click.Context(click.Command("x")))
    text = " ".join(text.split())
    for name, field in settings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert f"SLOTLINE_{name.upper()}" in text
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert f"SLOTLINE_{name.upper()}; {field.default}]" in text


def test_the_help_says_what_a_flag_takes() -> None:
    shown = {option.name: option.metavar for option in settings_options(WorkerSettings)}
    wanted = {"n_ctx": "N", "n_parallel": "N|auto", "temp": "X", "flash_attn": "auto|on|off", "chat_template": "TEXT"}
    assert {name: shown[name] for name in wanted} == wanted


def test_switches_go_both_ways_and_values_are_left_to_the_settings() -> None:
    given = parse(WorkerSettings, "--kv-unified", "off", "--cache-prompt", "--n-gpu-layers", "-1", "--model", "m.gguf")
    assert (given["kv_unified"], given["cache_prompt"]) == ("off", True)
    assert (given["n_gpu_layers"], given["model_path"]) == ("-1", "m.gguf")


def test_submit_has_a_flag_for_every_field_of_a_job() -> None:
    given = {param.name for param in submit.params}
    # The prompt and the conversation are the argument; the switch --stream does more than set the field. OpenAI's names
    # of fields that have one of ours are for those who bring a body of OpenAI's.
    assert set(JobRequest.model_fields) - {"prompt", "messages"} - set(ChatSpelling.model_fields) <= given
    assert CliRunner().invoke(submit, ["--help"]).exit_code == 0


def test_every_flag_of_a_job_becomes_a_field_that_the_server_takes(tmp_path) -> None:
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "x"')
    command = click.Command("x", callback=dict, params=[p for p in submit.params if p.name in JobRequest.model_fields])
    args = (
        "--model m --max-tokens 5 --temperature 0.5 --top-k 1 --top-p 0.5 --min-p 0 --seed -1 --repeat-penalty 1 "
        "--frequency-penalty 0.5 --presence-penalty -1 --grammar-root root --timeout-s 5 --queue-timeout-s 6 --id a1 "
        f"--retries 2 --result-ttl-s 60 --stop x --stop y --grammar @{grammar} --logit-bias 5=-1.5 --ignore-eos "
        '--no-cache-prompt --priority batch --metadata {"a":1} --stream'
    )
    one = command.main([*args.split(), "--depends-on", "a", "--depends-on", "b"], standalone_mode=False)
    for given in (one, command.main(["--run-at", "2030-01-01T00:00:00Z"], standalone_mode=False)):
        JobRequest.model_validate_json(json.dumps({"prompt": "p", **job_body(given)}))
    body = job_body(one)
    assert body["grammar"] == 'root ::= "x"'
    assert body["logit_bias"] == {"5": -1.5}
    assert body["cache_prompt"] is False
    assert body["depends_on"] == ["a", "b"]


def test_flags_of_a_chat_become_fields_that_the_server_takes(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "look"}}]')
    command = click.Command("x", callback=dict, params=[p for p in submit.params if p.name in JobRequest.model_fields])
    args = (
        f"--tools @{tools} --tool-choice look --no-parallel-tool-calls --logprobs 2 --fill-context "
        '--chat-template-kwargs {"enable_thinking":false}'
    )
    body = job_body(command.main(args.split(), standalone_mode=False))
    sent = JobRequest.model_validate_json(json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}))
    assert sent.tools is not None and sent.tools[0].function.name == "look"
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert (sent.parallel_tool_calls, sent.logprobs, sent.fill_context) == (False, 2, True)
    other = job_body(command.main(["--embed", "--response-format", '{"type":"text"}'], standalone_mode=False))
    assert other == {"embed": True, "response_format": {"type": "text"}, "stream": False}
    assert job_body({"tool_choice": "auto"}) == {"tool_choice": "auto"}


def test_flags_that_were_not_given_are_not_sent() -> None:
    assert job_body({"max_tokens": None, "stop": (), "ignore_eos": None, "seed": 0}) == {"seed": 0}


def test_token_ids_are_read_with_commas_or_spaces() -> None:
    assert token_ids("1,2 3, 4") == [1, 2, 3, 4]
