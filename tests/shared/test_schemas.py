from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.results import TokenEvent
from shared.schemas import GenerationRequest, JobRequest, Message

FULL: dict[str, Any] = {
    "prompt": "Once",
    "model": "m",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 42,
    "repeat_penalty": 1.1,
    "frequency_penalty": -0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": -1.5, "2147483647": 100},
    "grammar": 'root ::= "a"',
    "grammar_root": "root",
    "ignore_eos": True,
    "cache_prompt": False,
    "stop": ["a", "\n"],
    "stream": True,
    "timeout_s": 1.5,
    "queue_timeout_s": 3,
    "id": "job-1_A",
    "priority": "batch",
    "run_at": "2030-01-01T00:00:00+02:00",
    "retries": 2,
    "result_ttl_s": 60,
    "metadata": {"user": ["é", {"n": None}]},
    "embed": True,
    "webhook_url": "https://a.example/hook?x=1",
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": ["string", "null"], "default": None}}},
        "strict": True,
    },
}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": null}'}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"const": None}}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ],
    "fill_context": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}},
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False, "date": None},
    "logprobs": 0,
}


def parse(body: Any) -> JobRequest:
    return JobRequest.model_validate_json(json.dumps(body))


def blamed(body: Any) -> str:
    """The field a body is refused for: from the place of the error, or named in its text."""
    with pytest.raises(ValidationError) as caught:
        parse(body)
    first = caught.value.errors(include_url=False)[0]
    return str(first["loc"][0]) if first["loc"] else first["msg"]


NAN, INFINITY = float("nan"), float("inf")
NO_NUMBER = ["5", "hot", True, [1], {}, NAN, INFINITY, -INFINITY]
NO_WHOLE = [*NO_NUMBER, 1.5, 1.0]
NO_TEXT = [5, True, [], {}]

BAD = {
    "prompt": ["", [], 5, True, {}, ["a"], [1, "2"], [1, True], [1.0], [-1], [2**31], [1, None], [[1]]],
    "model": NO_TEXT,
    "max_tokens": [*NO_WHOLE, 0, -1, -2],
    "temperature": [*NO_NUMBER, -0.1, 10.1],
    "top_k": [*NO_WHOLE, -1, 2**31],
    "top_p": [*NO_NUMBER, 0, 1.1, 2],
    "min_p": [*NO_NUMBER, -0.1, 1.1],
    "seed": [*NO_WHOLE, -2, 2**63],
    "repeat_penalty": [*NO_NUMBER, 0, -1, 10**9],
    "frequency_penalty": [*NO_NUMBER, -2.1, 2.1, 10**9],
    "presence_penalty": [*NO_NUMBER, -2.1, 2.1, 10**9],
    "logit_bias": [
        5, "x", [], {"x": 1}, {"": 1}, {"-1": 1}, {"1.0": 1}, {" 1": 1}, {"2147483648": 1}, {"9" * 5000: 1}, {"٣": 1},
        {"1": "2"}, {"1": NAN}, {"1": INFINITY}, {"1": -100.5}, {"1": None}, {str(i): 0 for i in range(4097)},
    ],
    "grammar": [*NO_TEXT, ""],
    "grammar_root": [*NO_TEXT, "", "r" * 257],
    "fill_context": ["true", 1, None],
    "response_format": [
        5, "json_object", [], {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "strict": True},
        {"type": "text", "schema": {}}, {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": "{}"}},
        {"type": "json_schema", "json_schema": {"schema": []}},
        {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}},
        {"type": "json_schema", "json_schema": {"schema": {}, "name": "n" * 65}},
    ],
    "tools": [
        5, [], {}, ["look_up"], [{}], [{"type": "function"}], [{"type": "custom", "custom": {"name": "x"}}],
        [{"type": "function", "function": {"name": ""}}], [{"type": "function", "function": {"name": "n" * 65}}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "a", "parameters": []}}], [TOOL] * 2, [TOOL] * 129, [TOOL],
    ],
    "tool_choice": [
        5, "", "any", "auto", "required", {}, {"type": "function"}, {"type": "allowed_tools", "allowed_tools": {}},
    ],
    "parallel_tool_calls": ["true", 1, True],
    "chat_template_kwargs": [5, "x", [], {}, {str(i): i for i in range(33)}],
    "logprobs": [*(value for value in NO_WHOLE if value is not True), -1, 21],
    "max_completion_tokens": [*NO_WHOLE, 0, -1],
    "top_logprobs": [*NO_WHOLE, -1, 21],
    "reasoning_effort": ["", "most", 1, True, []],
    "embed": ["true", 1, None],
    "ignore_eos": ["true", 1, None],
    "cache_prompt": ["true", 1],
    "stop": ["", 5, {}, [""], ["a", ""], ["a", 5], ["a", None], "s" * 513, ["a"] * 65],
    "stream": ["true", 1, None],
    "timeout_s": [*NO_NUMBER, 0, -1, 30 * 86_400 + 1],
    "queue_timeout_s": [*NO_NUMBER, 0, -1, 30 * 86_400 + 1],
    "id": [*NO_TEXT, "", "a:b", "a b", "-a", "a\n", "é", "a" * 129],
    "priority": [*NO_TEXT, "", "urgent", "Normal", None],
    "delay_s": [*NO_NUMBER, 0, -1, 366 * 86_400 + 1],
    "run_at": [*NO_TEXT, "", "soon", "2030-01-01", "2030-01-01T00:00:00", "1893456000", "2030-13-01T00:00:00Z"],
    "depends_on": ["", [], 5, {}, [""], ["a", 5], ["a", "b:c"], ["a"] * 65],
    "retries": [*NO_WHOLE, -1, 101, None],
    "result_ttl_s": [*NO_WHOLE, 0, -1, 366 * 86_400 + 1],
    "metadata": [5, "x", [], {"a": NAN}, {"a": [{"b": INFINITY}]}],
    "webhook_url": [5, [], "", "x", "/path", "ftp://a.example/", "http://", "http://u:p@a.example/", "http://a.example/#x"],
}  # fmt: skip
CASES = [(field, value) for field, values in BAD.items() for value in values]


@pytest.mark.parametrize(("field", "value"), CASES, ids=lambda x: repr(x)[:30])
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    assert field in blamed({"prompt": "x", field: value})


def test_every_field_but_messages_is_tried_with_bad_values() -> None:
    assert set(JobRequest.model_fields) - {"messages"} == set(BAD)


BAD_MESSAGES: list[Any] = [
    [], {}, "x", ["x"], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": ""}],
    [{"role": "", "content": "x"}], [{"role": "user", "content": None}], [{"role": "user", "content": ["x"]}],
    [{"role": 1, "content": "x"}], [{"role": "r" * 65, "content": "x"}],
    [{"role": "user", "content": "x"}, {}], [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "text", "text": ""}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "assistant", "tool_calls": []}], [{"role": "assistant", "tool_calls": [{"id": "c"}]}],
    [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}],
    [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}],
    [{"role": "assistant", "content": "x", "audio": {"id": "a"}}],
    [{"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": ""}}],
    [{"role": "user", "content": "x", "name": 5}], [{"role": "user", "content": "x", "tool_call_id": 5}],
]  # fmt: skip


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=repr)
def test_bad_messages_are_refused_by_name(messages: Any) -> None:
    assert blamed({"messages": messages}) == "messages"


def test_a_message_may_say_its_text_in_parts() -> None:
    (system, user, *_) = parse(CHAT).messages or []
    assert (system.text, user.text) == ("Be brief.", "Hi")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "c1"},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL], "content": ""},
    ],
)
def test_a_tool_and_who_calls_one_may_have_nothing_to_say(message: dict[str, Any]) -> None:
    assert Message.model_validate(message).text == ""


def test_keys_of_a_message_that_are_not_used_are_passed_over() -> None:
    given = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "audio": None,
        "annotations": [],
        "from": "the future",
    }
    assert Message.model_validate(given).model_dump(exclude_none=True) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": {"type": "array"}}, {"type": "array"}),
        ({"type": "json_schema", "schema": {"type": "array"}}, {"type": "array"}),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}, {"type": "array"}),
        ({"type": "json_schema", "json_schema": {"schema": True}}, True),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, {}),
    ],
)
def test_a_response_format_says_which_schema_the_answer_has_to_fulfil(form: Any, schema: Any) -> None:
    assert parse({"prompt": "x", "response_format": form}).schema_of_answer == schema
    assert parse({"prompt": "x"}).schema_of_answer is None


@pytest.mark.parametrize("field", ["tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"])
def test_what_belongs_to_a_chat_needs_messages(field: str) -> None:
    value = "none" if field == "tool_choice" else CHAT[field]
    assert f"`{field}` needs `messages`" in blamed({"prompt": "x", field: value})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"grammar": "g", "response_format": {"type": "json_object"}}, "give `grammar` or `response_format`, not both"),
        ({"grammar": "g", "tools": [TOOL]}, "give `grammar` or `tools`, not both"),
        ({"tool_choice": "required"}, "`tool_choice` needs `tools`"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "`tool_choice` names 'x'"),
        ({"tools": [TOOL, TOOL]}, "`tools` names one function twice"),
        ({"embed": True}, "`embed` needs `prompt`"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused_by_name(fields: dict[str, Any], says: str) -> None:
    assert says in blamed({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    "fields",
    [{"grammar": "g", "tools": [TOOL], "tool_choice": "none"}, {"grammar": "g", "response_format": {"type": "text"}},
     {"tools": [TOOL], "tool_choice": "auto"}, {"tool_choice": "none"}],
)  # fmt: skip
def test_fields_that_only_seem_to_contradict_each_other_pass(fields: dict[str, Any]) -> None:
    assert set(fields) <= parse({"messages": [{"role": "user", "content": "x"}], **fields}).model_fields_set


@pytest.mark.parametrize("body", [5, "x", None, [], [{"prompt": "x"}]])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(ValidationError):
        parse(body)


@pytest.mark.parametrize("name", ["max_token", "Prompt", "prompt ", "n", "echo", "temp_", ""])
def test_an_unknown_field_is_refused_by_its_name(name: str) -> None:
    assert blamed({"prompt": "x", name: 1}) == name


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": None, "messages": None},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"max_tokens": 5},
    ],
)
def test_exactly_one_of_prompt_and_messages_is_wanted(body: dict[str, Any]) -> None:
    assert "give either `prompt` or `messages`" in blamed(body)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"delay_s": 5, "run_at": "2030-01-01T00:00:00Z"}, ("delay_s", "run_at")),
        ({"delay_s": 5, "depends_on": "a"}, ("delay_s", "depends_on")),
        ({"run_at": "2030-01-01T00:00:00Z", "depends_on": ["a"]}, ("run_at", "depends_on")),
    ],
)
def test_two_ways_to_wait_are_refused_and_both_named(other: dict[str, Any], names: tuple[str, str]) -> None:
    message = blamed({"prompt": "x", **other})
    assert all(f"`{name}`" in message for name in names)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [0, 2**31 - 1]), ("prompt", " "), ("prompt", "a\0b"), ("prompt", "😀\r\n"), ("max_tokens", 1),
        ("max_tokens", 10**9), ("max_tokens", None), ("temperature", 0), ("temperature", 10), ("top_k", 0),
        ("top_p", 1), ("min_p", 0), ("seed", -1), ("seed", 0), ("seed", 2**32 + 1), ("seed", 2**63 - 1),
        ("repeat_penalty", 10), ("frequency_penalty", -2), ("presence_penalty", 2), ("logit_bias", {}),
        ("logit_bias", {"0": -100}), ("stop", None), ("stop", []), ("stop", "x"), ("stop", "s" * 512),
        ("id", "a" * 128), ("delay_s", 0.1), ("run_at", "2030-01-01T00:00:00Z"),
        ("run_at", "1960-01-01T00:00:00-05:30"), ("depends_on", "a"), ("depends_on", ["a"] * 64), ("retries", 0),
        ("retries", 100), ("metadata", {}), ("metadata", {"a": None}),
    ],
    ids=lambda x: repr(x)[:30],
)  # fmt: skip
def test_the_edges_of_what_is_allowed_are_allowed(field: str, value: Any) -> None:
    assert field in parse({"prompt": "x", field: value}).model_fields_set


def test_metadata_may_have_16_kib_as_json_and_no_byte_more() -> None:
    frame = len(json.dumps({"a": ""}))
    parse({"prompt": "x", "metadata": {"a": "x" * (16_384 - frame)}})
    assert "`metadata` is larger" in blamed({"prompt": "x", "metadata": {"a": "x" * (16_385 - frame)}})
    assert "`metadata` is larger" in blamed({"prompt": "x", "metadata": {"a": "é" * 3000}})


@pytest.mark.parametrize("text", ['{"prompt": "x"', "", "{'prompt': 1}", '{"prompt": "\\ud800"}', '{"prompt": "x"} x'])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate_json(text)
    assert caught.value.errors()[0]["type"] == "json_invalid"


def test_other_encodings_than_utf_8_are_refused() -> None:
    with pytest.raises(ValidationError):
        JobRequest.model_validate_json('{"prompt": "é"}'.encode("latin-1"))


# --- aliases ---


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("temp", "temperature"),
        ("penalty_repeat", "repeat_penalty"),
        ("penalty_freq", "frequency_penalty"),
        ("penalty_present", "presence_penalty"),
    ],
)
def test_the_workers_spelling_means_the_same(alias: str, field: str) -> None:
    by_alias, by_name = parse({"prompt": "x", alias: 0.5}), parse({"prompt": "x", field: 0.5})
    assert by_alias == by_name
    assert by_alias.fingerprint() == by_name.fingerprint()
    assert by_alias.payload() == {"prompt": "x", field: 0.5}
    assert alias in blamed({"prompt": "x", alias: "hot"})
    assert alias in blamed({"prompt": "x", alias: 0.5, field: 0.5})


# --- payload ---


@pytest.mark.parametrize("body", [FULL, CHAT], ids=["prompt", "chat"])
def test_the_payload_is_a_generation_request_again(body: dict[str, Any]) -> None:
    request = parse(body)
    again = GenerationRequest.model_validate(json.loads(json.dumps(request.payload())))
    shared_fields = set(GenerationRequest.model_fields)
    assert again.model_dump() == request.model_dump(include=shared_fields)
    assert set(request.payload()) == set(body) & shared_fields


def test_nulls_inside_schemas_and_template_variables_travel_too() -> None:
    payload = parse(CHAT).payload()
    assert payload["tools"] == [TOOL]
    assert payload["chat_template_kwargs"] == CHAT["chat_template_kwargs"]
    assert payload["response_format"] == CHAT["response_format"]
    assert payload["messages"][2]["tool_calls"][0]["function"] == CALL["function"]


def test_every_field_of_a_generation_is_in_one_of_the_full_bodies() -> None:
    assert set(GenerationRequest.model_fields) == (set(FULL) | set(CHAT)) & set(GenerationRequest.model_fields)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(
    st.fixed_dictionaries(
        {"prompt": TEXT | st.lists(st.integers(0, 9), min_size=1)},
        optional={
            "max_tokens": st.integers(1, 2**40),
            "temperature": st.floats(0, 10),
            "seed": st.integers(-1, 2**63 - 1),
            "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-100, 100), max_size=3),
            "stop": st.none() | st.just("x") | st.lists(st.sampled_from(["a", "é"]), max_size=3),
            "ignore_eos": st.booleans(),
            "timeout_s": st.floats(0.1, 100),
        },
    )
)  # fmt: skip
def test_any_payload_gives_the_request_back(body: dict[str, Any]) -> None:
    request = parse(body)
    again = GenerationRequest.model_validate(json.loads(json.dumps(request.payload())))
    assert again.model_dump() == request.model_dump(include=set(GenerationRequest.model_fields))


def test_the_payload_leaves_out_what_was_left_out() -> None:
    assert parse({"prompt": "x", "stop": None, "ignore_eos": False, "id": "a", "retries": 3}).payload() == {
        "prompt": "x"
    }


def test_messages_travel_in_the_payload() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert parse({"messages": messages}).payload() == {"messages": messages}


# --- fingerprint ---


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_fields_does_not_change_the_fingerprint(rng: random.Random) -> None:
    assert parse(_shuffled(FULL, rng)).fingerprint() == parse(FULL).fingerprint()


def _shuffled(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict):
        return value
    keys = list(value)
    rng.shuffle(keys)
    return {key: _shuffled(value[key], rng) for key in keys}


CHANGED = {
    "prompt": "Twice", "model": "n", "max_tokens": 6, "temperature": 0.6, "top_k": 4, "top_p": 0.8, "min_p": 0.2,
    "seed": 43, "repeat_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"5": -1.5},
    "grammar": 'root ::= "b"', "grammar_root": "other", "ignore_eos": False, "cache_prompt": True,
    "stop": ["\n", "a"], "stream": False, "timeout_s": 2.5, "queue_timeout_s": 4, "priority": "normal",
    "run_at": "2030-01-01T00:00:01+02:00", "retries": 3, "result_ttl_s": 61, "metadata": {"user": ["é", {"n": 0}]},
    "embed": False, "webhook_url": "https://a.example/hook?x=2",
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(set(FULL) - {"id"}))
def test_another_value_of_any_field_is_another_fingerprint(field: str) -> None:
    without = {k: v for k, v in FULL.items() if k != field} | ({"prompt": "y"} if field == "prompt" else {})
    prints = {parse(body).fingerprint() for body in (FULL, {**FULL, field: CHANGED[field]}, without)}
    assert len(prints) == (
        2 if field in ("ignore_eos", "stream", "priority", "embed") else 3
    )  # where CHANGED is the default


@pytest.mark.parametrize("field", sorted(set(CHAT) - {"messages", "tools"}))
def test_a_chat_without_one_of_its_fields_has_another_fingerprint(field: str) -> None:
    without = {key: value for key, value in CHAT.items() if key != field}
    assert parse(without).fingerprint() != parse(CHAT).fingerprint()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("messages", 1, "content"), "Ho"),
        (("messages", 2, "reasoning_content"), "Ha."),
        (("tools", 0, "function", "description"), "Says what a word means."),
        (("response_format", "json_schema", "schema"), {"type": "array"}),
        (("chat_template_kwargs", "date"), 0),
    ],
)
def test_a_change_deep_inside_is_another_fingerprint(path: tuple[Any, ...], value: Any) -> None:
    changed = json.loads(json.dumps(CHAT))
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert parse(changed).fingerprint() != parse(CHAT).fingerprint()


def test_the_fingerprint_is_the_bodys_not_the_ids() -> None:
    assert parse({**FULL, "id": "other"}).fingerprint() == parse(FULL).fingerprint()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"priority": "normal", "retries": 0, "ignore_eos": False, "stream": False}),
        ({}, {"stop": None, "seed": None, "metadata": None}),
        ({"temperature": 1}, {"temperature": 1.0}),
    ],
)
def test_what_means_the_same_has_the_same_fingerprint(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert parse({"prompt": "x", **one}).fingerprint() == parse({"prompt": "x", **other}).fingerprint()


def test_a_prompt_of_digits_is_not_a_prompt_of_tokens() -> None:
    assert parse({"prompt": "[1]"}).fingerprint() != parse({"prompt": [1]}).fingerprint()


# --- small readings ---


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ([], ()), ("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_stop_is_read_as_a_tuple(stop: Any, strings: tuple[str, ...]) -> None:
    assert parse({"prompt": "x", "stop": stop}).stop_strings == strings


@pytest.mark.parametrize(
    ("given", "ids"), [(None, []), ("a", ["a"]), (["b", "a", "b"], ["b", "a"])], ids=["none", "one", "repeated"]
)
def test_dependencies_are_read_in_order_and_once(given: Any, ids: list[str]) -> None:
    assert parse({"prompt": "x", "depends_on": given}).dependencies == ids


def test_a_token_event_says_index_text_and_token_and_nothing_else() -> None:
    assert TokenEvent.model_validate({"index": 0, "text": "", "token": None}).token is None
    with pytest.raises(ValidationError):
        TokenEvent.model_validate({"index": 0, "text": "", "token": None, "logprob": 1.0})
    with pytest.raises(ValidationError):
        TokenEvent.model_validate({"index": 0, "text": ""})


def test_a_token_event_may_carry_reasoning_tool_calls_and_log_probabilities() -> None:
    likely = {"token": "a", "logprob": -0.5, "bytes": [97]}
    event = {
        "index": 3,
        "text": "",
        "token": 5,
        "reasoning_content": "Hm",
        "tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}],
        "logprobs": likely | {"top_logprobs": [likely]},
    }
    assert TokenEvent.model_validate(event).model_dump() == event


def test_a_job_may_be_spelled_as_the_chat_endpoint_spells_it() -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    theirs = {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 3, "reasoning_effort": "none"}
    ours = {"max_tokens": 5, "logprobs": 3, "chat_template_kwargs": {"enable_thinking": False}}
    spelled, plain = JobRequest.model_validate(chat | theirs), JobRequest.model_validate(chat | ours)
    assert spelled.payload() == plain.payload() and spelled.fingerprint() == plain.fingerprint()
    assert JobRequest(prompt="hi", logprobs=False).logprobs is None
    assert JobRequest(prompt="hi", logprobs=True).logprobs == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
        ({"logprobs": False, "top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
        ({"logprobs": 21}, "logprobs"),
        ({"reasoning_effort": "low"}, "`reasoning_effort` needs `messages`"),
    ],
)
def test_a_job_that_contradicts_itself_in_two_spellings_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        JobRequest.model_validate({"prompt": "hi"} | fields)
