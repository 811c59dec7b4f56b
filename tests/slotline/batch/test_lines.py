from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.schemas import GenerationRequest
from slotline.batch.lines import LINE_OPTIONS, Line, LineReader, Rules, content_hash, line_seed
from slotline.batch.problems import Problem
from slotline.batch.reading import open_source
from slotline.batch.template import Template


def lines(tmp_path: Path, *given: dict[str, Any], rules: Rules | None = None) -> list[Line | Problem]:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    return list(LineReader(open_source(str(path)), rules or Rules(seed=-1)))


def one(tmp_path: Path, given: dict[str, Any], **rules: Any) -> Line:
    (line,) = lines(tmp_path, given, rules=Rules(**{"seed": -1, **rules}))
    assert isinstance(line, Line), line
    return line


def problem(tmp_path: Path, given: dict[str, Any], **rules: Any) -> str:
    (line,) = lines(tmp_path, given, rules=Rules(**rules))
    assert isinstance(line, Problem), line
    return line.message


def openai(body: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body or {"messages": [USER]}}
    return line | fields


USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be short"}


def test_a_plain_line_is_a_job_of_its_prompt(tmp_path: Path) -> None:
    line = one(tmp_path, {"prompt": "hi", "id": 7})
    assert (line.endpoint, line.body, line.custom_id) == ("/v1/jobs", {"prompt": "hi"}, None)
    assert line.fields == {"prompt": "hi", "id": 7}


def test_a_plain_line_may_bring_options_which_count_before_the_commands(tmp_path: Path) -> None:
    given = {"prompt": "hi", "max_tokens": 5, "top_k": None, "category": "x"}
    line = one(tmp_path, given, options={"max_tokens": 9, "top_k": 3, "temperature": 0.5})
    assert line.body == {"prompt": "hi", "max_tokens": 5, "top_k": 3, "temperature": 0.5}


def test_every_option_of_a_line_is_a_field_of_a_job() -> None:
    assert GenerationRequest.model_fields.keys() >= LINE_OPTIONS


def test_a_line_may_ask_for_what_its_row_can_hold(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": "hi", "logprobs": 2}).body["logprobs"] == 2


def test_with_a_template_every_field_is_data(tmp_path: Path) -> None:
    given = {"text": "so", "temperature": "warm", "prompt": "unused", "custom_id": 3, "body": "x"}
    line = one(tmp_path, given, template=Template("Classify: {text}"))
    assert line.body == {"prompt": "Classify: so"}


def test_the_columns_of_a_table_are_data(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt,temperature\nhi,20.5\n")
    (line,) = LineReader(open_source(str(path)), Rules(seed=-1))
    assert isinstance(line, Line)
    assert line.body == {"prompt": "hi"}


def test_chat_and_system_make_a_conversation_of_a_prompt(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": "hi"}, chat=True).body == {"messages": [USER]}
    assert one(tmp_path, {"prompt": "hi"}, system="be short").body == {"messages": [SYSTEM, USER]}


def test_a_conversation_keeps_a_system_message_of_its_own(tmp_path: Path) -> None:
    own = {"role": "system", "content": "mine"}
    assert one(tmp_path, {"messages": [own, USER]}, system="be short").body == {"messages": [own, USER]}
    assert one(tmp_path, {"messages": [USER]}, system="be short").body == {"messages": [SYSTEM, USER]}
    assert one(tmp_path, openai(), system="be short").body == {"messages": [SYSTEM, USER]}


def test_an_openai_line_goes_to_its_endpoint_with_its_body(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [USER], "max_tokens": 5}
    line = one(tmp_path, openai(body), options={"max_tokens": 9, "temperature": 0.0})
    assert (line.endpoint, line.custom_id) == ("/v1/chat/completions", "a")
    assert line.body == {**body, "temperature": 0.0}


def test_max_completion_tokens_takes_the_place_of_the_commands_max_tokens(tmp_path: Path) -> None:
    body = {"messages": [USER], "max_completion_tokens": 5}
    assert one(tmp_path, openai(body), options={"max_tokens": 9}).body == body


@pytest.mark.parametrize("make", [lambda own: {"prompt": "x", **own}, lambda own: openai({"messages": [USER], **own})])
def test_a_line_with_a_form_of_its_own_does_not_get_the_commands_beside_it(tmp_path: Path, make: Any) -> None:
    line = one(tmp_path, make({"grammar": 'root ::= "a"'}), options={"response_format": {"type": "json_object"}})
    assert line.body["grammar"] == 'root ::= "a"'
    assert "response_format" not in line.body


def test_an_embeddings_line_gets_neither_options_nor_seed(tmp_path: Path) -> None:
    line = one(tmp_path, openai({"input": "hi"}, url="/v1/embeddings"), options={"max_tokens": 9}, seed=4)
    assert line.body == {"input": "hi"}


def test_the_model_of_the_command_is_every_lines(tmp_path: Path) -> None:
    assert one(tmp_path, openai({"model": "gpt", "messages": [USER]}), model="ours").body["model"] == "ours"
    assert one(tmp_path, {"prompt": "hi", "model": "gpt"}, model="ours").body["model"] == "ours"


def test_the_seed_of_a_line_follows_from_seed_and_number_alone(tmp_path: Path) -> None:
    first, second = lines(tmp_path, {"prompt": "a"}, {"prompt": "a"}, rules=Rules(seed=7))
    assert isinstance(first, Line)
    assert isinstance(second, Line)
    assert first.body["seed"] == line_seed(7, 1)
    assert second.body["seed"] == line_seed(7, 2)
    assert len({line_seed(seed, n) for seed in range(30) for n in range(1, 30)}) == 30 * 29
    assert line_seed(7, 1) == 7768823104508221553, "the rule is documented: a change of it is seen by users"


def test_a_seed_of_its_own_stays_and_minus_one_leaves_it_to_the_server(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": "a", "seed": 3}, seed=7).body["seed"] == 3
    assert one(tmp_path, openai({"messages": [USER], "seed": 3}), seed=7).body["seed"] == 3
    assert "seed" not in one(tmp_path, {"prompt": "a"}, seed=-1).body


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": "POST"} | {"custom_id": "a"}, "`url` None"),
        (openai(custom_id=""), "`custom_id`"),
        (openai(custom_id=5), "`custom_id`"),
        (openai(custom_id="x" * 10_000), "10000 characters"),
        (openai(method="GET"), "`method` POST"),
        (openai(url="/v1/models"), "`url` '/v1/models'"),
        (openai(body="text"), "`body`, which is an object"),
        (openai({"messages": [USER], "stream": True}), "`stream`"),
        ({"text": "a"}, "neither `prompt`, `messages` nor `body`.*'text'"),
        ({"prompt": "a", "messages": [USER]}, "both"),
    ],
)
def test_a_line_without_the_structure_of_one_is_a_problem(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    message = problem(tmp_path, given)
    assert re.search(reason, message), message


def test_a_system_message_is_refused_where_there_are_no_messages(tmp_path: Path) -> None:
    assert "--system" in problem(tmp_path, openai({"prompt": "a"}, url="/v1/completions"), system="x")


def test_one_file_holds_one_kind_of_lines(tmp_path: Path) -> None:
    _, other = lines(tmp_path, {"prompt": "a"}, openai())
    assert other == Problem(2, "is an OpenAI batch line, while line 1 is a plain line: one file holds one kind")


def test_the_texts_of_a_prompt_are_found_in_every_form(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "b"}]
    assert one(tmp_path, {"messages": [SYSTEM, {"role": "user", "content": parts}]}).prompt_text == "be short\nb"
    assert one(tmp_path, openai({"input": ["a", "b"]}, url="/v1/embeddings")).prompt_text == "a\nb"


def test_the_content_hash_is_of_names_and_values() -> None:
    assert content_hash({"a": 1}) == content_hash({"a": 1})
    assert content_hash({"a": 1}) != content_hash({"a": 2})
    assert content_hash({"a": 1}) != content_hash({"b": 1})
