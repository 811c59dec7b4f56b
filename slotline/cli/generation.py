"""The options of a job: one flag for each field of `POST /v1/jobs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

#: Field, type, what `--help` says. The server checks the values and names what is wrong.
PLAIN: tuple[tuple[str, type, str], ...] = (
    ("model", str, "Model to use; left out, the only or first one."),
    ("max_tokens", int, "Most tokens to generate."),
    ("temperature", float, "0 is greedy."),
    ("top_k", int, "Sample from this many tokens; 0 means off."),
    ("top_p", float, "Sample from the tokens that make up this share; 1 means off."),
    ("min_p", float, "Leave out tokens below this share of the best; 0 means off."),
    ("seed", int, "-1 means another one each time."),
    ("repeat_penalty", float, "1 means off."),
    ("frequency_penalty", float, "0 means off."),
    ("presence_penalty", float, "0 means off."),
    ("grammar_root", str, "Root rule of the grammar."),
    ("logprobs", int, "Give each token's log probability, and those of this many likely ones."),
    ("timeout_s", float, "Time in a slot."),
    ("queue_timeout_s", float, "Time spent waiting."),
    ("id", str, "An id of yours: the same id with the same body is the same job."),
    ("delay_s", float, "Start no sooner than this from now."),
    ("run_at", str, "Start no sooner than this; ISO 8601 with a time zone."),
    ("retries", int, "Times to try again after a failure that may pass."),
    ("result_ttl_s", int, "How long the ended job is kept."),
    ("webhook_url", str, "Told, by a signed POST, when the job has ended."),
)

#: Fields that are JSON, and what `--help` says. `@FILE` reads it from a file.
AS_JSON: tuple[tuple[str, str], ...] = (
    ("response_format", "What form the answer has, as in the OpenAI API."),
    ("tools", "Tools the model may call, as in the OpenAI API."),
    ("chat_template_kwargs", "Variables of the chat template."),
    ("metadata", "Kept with the job and given back."),
)


#: Of these and of the flags below, those that say what an answer is to be; the others say how its job is queued.
OF_THE_ANSWER = frozenset(
    (
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
        "frequency_penalty",
        "presence_penalty",
        "grammar_root",
        "timeout_s",
        "stop",
        "grammar",
        "logit_bias",
        "ignore_eos",
        "cache_prompt",
    )
)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every flag of a job to a command, which takes them as keyword arguments."""
    return _add(command, _options())


def answer_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that say what an answer is to be, of those of a job; `model` and `seed` are left to the command."""
    return _add(command, {name: option for name, option in _options().items() if name in OF_THE_ANSWER})


def _options() -> dict[str, Callable[..., Any]]:
    plain = {name: click.option(_flag(name), name, type=kind, help=text) for name, kind, text in PLAIN}
    priorities = click.Choice(["interactive", "normal", "batch"])
    as_json = {name: click.option(_flag(name), metavar="JSON", help=f"{text} Or @FILE.") for name, text in AS_JSON}
    return (
        plain
        | as_json
        | {
            "stop": click.option("--stop", multiple=True, help="End before this text. May be repeated."),
            "grammar": click.option("--grammar", metavar="GBNF", help="GBNF grammar, or @FILE."),
            "logit_bias": click.option("--logit-bias", multiple=True, metavar="TOKEN=BIAS", help="May be repeated."),
            "ignore_eos": click.option(
                "--ignore-eos", is_flag=True, default=None, help="Go on after the model's end token."
            ),
            "cache_prompt": click.option(
                "--cache-prompt/--no-cache-prompt", default=None, help="Keep and use the KV cache of prefixes."
            ),
            "priority": click.option("--priority", type=priorities, help="Who goes first."),
            "depends_on": click.option(
                "--depends-on", multiple=True, metavar="ID", help="Start after this job. May be repeated."
            ),
            "tool_choice": click.option(
                "--tool-choice", metavar="NAME", help="none, auto, required, or the one to call."
            ),
            "parallel_tool_calls": click.option(
                "--parallel-tool-calls/--no-parallel-tool-calls", default=None, help="Whether it may call several."
            ),
            "fill_context": click.option(
                "--fill-context", is_flag=True, default=None, help="Without --max-tokens: as many as there is room for."
            ),
            "embed": click.option(
                "--embed", is_flag=True, default=None, help="Compute an embedding instead (shown with --json)."
            ),
        }
    )


def _add(command: Callable[..., Any], options: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    for option in reversed(options.values()):
        command = option(command)
    return command


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def job_body(given: dict[str, Any]) -> dict[str, Any]:
    """The body of the request from the flags that were given."""
    body = {name: value for name, value in given.items() if value is not None and value != ()}
    for name in ("stop", "depends_on"):
        if name in body:
            body[name] = list(body[name])
    if "grammar" in body:
        body["grammar"] = _text(body["grammar"], "grammar")
    if "logit_bias" in body:
        body["logit_bias"] = dict(map(_bias, body["logit_bias"]))
    for name, _ in AS_JSON:
        if name in body:
            body[name] = _json(_text(body[name], name), name)
    if body.get("tool_choice") not in (None, "none", "auto", "required"):
        body["tool_choice"] = {"type": "function", "function": {"name": body["tool_choice"]}}
    return body


def token_ids(text: str) -> list[int]:
    """Token ids with commas or spaces between."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of token ids", param_hint="--tokens") from None


def _text(value: str, name: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint=_flag(name)) from None


def _bias(pair: str) -> tuple[str, float]:
    token, _, bias = pair.partition("=")
    try:
        return token, float(bias)
    except ValueError:
        raise click.BadParameter(f"{pair!r} is not TOKEN=BIAS", param_hint="--logit-bias") from None


def _json(value: str, name: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint=_flag(name)) from None
