from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from shared.errors import InvalidRequest, UnsupportedField
from shared.openai.chat import ChatExchange, ChatRequest, read_chat
from shared.schemas import JobRequest
from tests.shared.openai.ended import CALL, completed, event, logprob

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}


def read(**fields: Any) -> ChatExchange:
    return read_chat(json.dumps({"messages": HI, **fields}).encode())


def only_job(**fields: Any) -> JobRequest:
    (job,) = read(**fields).jobs()
    return job


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    return caught.value


# --- bodies ---


def test_the_shortest_body_is_one_interactive_job_with_the_rest_of_the_context() -> None:
    job = only_job()
    assert job.payload() == {"messages": HI, "fill_context": True}
    assert (job.priority, job.id, job.metadata) == ("interactive", None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "tiny"), ("max_tokens", 5), ("temperature", 0.5), ("top_p", 0.9), ("top_k", 3), ("min_p", 0.1),
        ("seed", 42), ("repeat_penalty", 1.1), ("frequency_penalty", -0.5), ("presence_penalty", 0.5),
        ("logit_bias", {"5": -1.5}), ("grammar", 'root ::= "a"'), ("grammar_root", "r"), ("response_format", SCHEMA),
        ("ignore_eos", True), ("cache_prompt", False), ("stop", "x"), ("stop", ["x", "y"]), ("stream", True),
        ("timeout_s", 1.5), ("queue_timeout_s", 3.0), ("tools", [TOOL]), ("parallel_tool_calls", False),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_a_field_goes_to_the_job_as_it_is(field: str, value: Any) -> None:
    assert only_job(**{field: value}).payload()[field] == value


@pytest.mark.parametrize("choice", ["none", "auto", "required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_tool_choice_goes_to_the_job(choice: Any) -> None:
    assert only_job(tools=[TOOL], tool_choice=choice).payload()["tool_choice"] == choice


def test_the_newer_name_of_max_tokens_means_the_same() -> None:
    assert only_job(max_completion_tokens=5).max_tokens == 5
    assert only_job(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert refusal(max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    names = set(ChatRequest.model_fields) - {"messages"}
    assert read(**dict.fromkeys(names)).jobs() == read().jobs()


@pytest.mark.parametrize(("fields", "logprobs"), [({}, 0), ({"top_logprobs": None}, 0), ({"top_logprobs": 20}, 20)])
def test_logprobs_are_asked_of_the_job_with_as_many_likely_tokens(fields: dict[str, Any], logprobs: int) -> None:
    assert only_job(logprobs=True, **fields).logprobs == logprobs
    assert only_job(logprobs=False).logprobs is None


def test_the_user_and_the_metadata_are_kept_with_the_job() -> None:
    assert only_job(user="ann").metadata == {"user": "ann"}
    assert only_job(user="ann", metadata={"run": "7"}).metadata == {"user": "ann", "run": "7"}
    assert only_job(user="ann", metadata={"user": "bob"}).metadata == {"user": "bob"}


@pytest.mark.parametrize("priority", ["normal", "batch"])
def test_another_priority_may_be_asked_for(priority: str) -> None:
    assert only_job(priority=priority).priority == priority


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}, {"reasoning_effort": "low", "a": 1}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_the_reasoning_effort_is_a_variable_of_the_template(fields: Any, variables: Any) -> None:
    assert only_job(**fields).chat_template_kwargs == variables


@pytest.mark.parametrize("n", [1, 2, 128])
def test_each_choice_is_a_job(n: int) -> None:
    jobs = read(n=n).jobs()
    assert len(jobs) == n
    assert {job.seed for job in jobs} == {None}


def test_choices_take_seeds_one_after_the_other_so_that_they_differ_and_can_be_had_again() -> None:
    assert [job.seed for job in read(n=3, seed=42).jobs()] == [42, 43, 44]
    assert [job.seed for job in read(n=2, seed=2**63 - 1).jobs()] == [2**63 - 1, 0]
    assert [job.seed for job in read(n=2, seed=-1).jobs()] == [-1, -1]


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, (False, False, False)),
        ({"stream": True}, (True, False, False)),
        ({"stream": True, "stream_options": {"include_usage": True}}, (True, True, False)),
        (
            {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": True}},
            (True, False, False),
        ),
        ({"background": True}, (False, False, True)),
    ],
)
def test_the_exchange_says_how_to_answer(fields: dict[str, Any], flags: tuple[bool, bool, bool]) -> None:
    exchange = read(**fields)
    assert (exchange.stream, exchange.include_usage, exchange.background) == flags
    assert exchange.jobs()[0].stream is exchange.stream


def test_the_role_developer_is_the_role_system() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HI]
    assert only_job(messages=messages).payload()["messages"] == [{"role": "system", "content": "Be brief."}, *HI]


def test_messages_of_earlier_turns_keep_calls_reasoning_and_names_and_lose_what_is_not_used() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "assistant", "content": "b", "reasoning_content": "r", "annotations": [], "function_call": None},
        *HI,
    ]
    kept = only_job(messages=turns).messages or []
    assert [message.model_dump(exclude_none=True) for message in kept] == [
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "assistant", "content": "b", "reasoning_content": "r"},
        *HI,
    ]


NAN, INFINITY = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    ("temperature", NAN), ("temperature", INFINITY), ("temperature", -1), ("temperature", "hot"), ("top_p", 2),
    ("top_p", NAN), ("top_k", "x"), ("top_k", -1), ("min_p", 1.5), ("frequency_penalty", 10**9),
    ("presence_penalty", -3), ("repeat_penalty", 10**9), ("n", 0), ("n", 129), ("n", "2"), ("n", 1.5),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", -2), ("max_tokens", "5"), ("max_completion_tokens", 0),
    ("max_completion_tokens", "5"), ("seed", -2), ("seed", "x"), ("stop", ""), ("stop", 5), ("stop", ["a", ""]),
    ("logit_bias", []), ("logit_bias", {"x": 1}), ("logprobs", 5), ("logprobs", "true"), ("top_logprobs", 21),
    ("top_logprobs", 5), ("stream", "true"), ("stream_options", {"include_usage": True}), ("stream_options", 5),
    ("response_format", "json"), ("tools", []), ("tools", {}), ("tool_choice", "any"), ("tool_choice", "auto"),
    ("tool_choice", {"type": "function", "function": {"name": "x"}}), ("parallel_tool_calls", "yes"),
    ("user", 5), ("user", "u" * 513), ("metadata", []), ("metadata", {"a": "x" * 16_384}),
    ("reasoning_effort", "lots"), ("chat_template_kwargs", []), ("grammar", ""), ("ignore_eos", 1),
    ("cache_prompt", "no"), ("timeout_s", 0), ("queue_timeout_s", NAN), ("priority", "urgent"), ("background", 1),
    ("model", 5), ("messages", []), ("messages", None), ("messages", "Hi"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda x: repr(x)[:40])
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert f"`{field}`" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"logit_bias": {"5": NAN}}, "logit_bias.5"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": SCHEMA | {"json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": SCHEMA | {"json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools.1.function"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"grammar": 'root ::= "a"', "tools": [TOOL]}, "grammar"),
        ({"grammar": 'root ::= "a"', "response_format": SCHEMA}, "grammar"),
        ({"messages": ["Hi"]}, "messages.0"),
        ({"messages": [*HI, {"content": "Hi"}]}, "messages.1.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages.0.tool_calls.0.function"),
    ],
)  # fmt: skip
def test_a_bad_part_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert f"`{param}`" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}, "messages.0.content.0.type")
        for kind in ("image_url", "input_audio", "file", "refusal")
    ]
    + [
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages.0.audio"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages.0.function_call"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]}, "tools.1.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
    ],
    ids=str,
)
def test_a_part_that_is_not_served_is_refused_as_unsupported_by_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (type(error), error.param) == (UnsupportedField, param)
    assert f"`{param}`" in error.message
    assert "is not served" in error.message


# --- answers ---


def test_an_answer_is_what_the_sdk_parses() -> None:
    found = read().answer(CALL, [completed("Hello.", 7, 3, 2)])
    assert found == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert ChatCompletion.model_validate(found, strict=True).choices[0].message.content == "Hello."


CALLS = [{"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "é"}'}}]


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("", {"finish_reason": "length"}, {"content": ""}),
        ("", {"tool_calls": CALLS, "finish_reason": "tool_calls"}, {"content": None, "tool_calls": CALLS}),
        ("So:", {"tool_calls": CALLS, "finish_reason": "tool_calls"}, {"content": "So:", "tool_calls": CALLS}),
        ("Yes", {"reasoning_content": "Hm."}, {"content": "Yes", "reasoning_content": "Hm."}),
        ("Yes", {"reasoning_content": ""}, {"content": "Yes", "reasoning_content": ""}),
    ],
)
def test_a_message_has_calls_and_reasoning_apart_from_its_content(text: str, more: Any, message: Any) -> None:
    found = read().answer(CALL, [completed(text, **more)])
    assert found["choices"][0]["message"] == {"role": "assistant", "refusal": None, **message}
    parsed = ChatCompletion.model_validate(found, strict=True).choices[0]
    assert parsed.finish_reason == more.get("finish_reason", "stop")
    assert len(parsed.message.tool_calls or ()) == len(more.get("tool_calls", ()))


def test_log_probabilities_have_their_bytes_and_the_likely_tokens() -> None:
    tokens = [logprob("He", -0.25, top=[("He", -0.25), ("Wh", -2.0)]), logprob("\ufffd", -1.0, b"\xf0\x9f")]
    found = read(logprobs=True, top_logprobs=2).answer(CALL, [completed("He", logprobs=tokens)])
    parsed = ChatCompletion.model_validate(found, strict=True).choices[0].logprobs
    assert parsed is not None
    assert parsed.content is not None
    assert [(token.token, token.bytes) for token in parsed.content] == [("He", [72, 101]), ("\ufffd", [0xF0, 0x9F])]
    assert [likely.token for likely in parsed.content[0].top_logprobs] == ["He", "Wh"]


def test_the_prompt_counts_once_and_the_tokens_of_all_choices() -> None:
    finals = [completed("a", 7, 3, 7), completed("b", 7, 4, 0), completed("c", 7, 5, 6)]
    found = read(n=3).answer(CALL, finals)
    assert [choice["message"]["content"] for choice in found["choices"]] == ["a", "b", "c"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 12,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


# --- chunks ---


def test_a_stream_is_a_role_then_pieces_then_a_reason() -> None:
    exchange = read(stream=True)
    chunks = [
        exchange.opening(CALL, 0),
        exchange.chunk(CALL, 0, event(0, "Hel")),
        exchange.chunk(CALL, 0, event(1, "lo")),
        exchange.closing(CALL, 0, completed("Hello")),
    ]
    common = {"id": "chatcmpl-abc", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "tiny"}
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert chunks == [
        {**common, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}]},
        {**common, "choices": [{**choice, "delta": {"content": "Hel"}}]},
        {**common, "choices": [{**choice, "delta": {"content": "lo"}}]},
        {**common, "choices": [{**choice, "delta": {}, "finish_reason": "stop"}]},
    ]


def test_a_token_that_shows_nothing_yet_is_no_chunk() -> None:
    assert read(stream=True).chunk(CALL, 0, event(0, "")) is None


def test_a_token_that_shows_nothing_yet_has_a_chunk_for_its_log_probability() -> None:
    found = read(stream=True, logprobs=True).chunk(CALL, 1, event(0, "", logprobs=logprob("\ufffd", -1, b"\xf0")))
    assert found is not None
    (choice,) = ChatCompletionChunk.model_validate(found).choices
    assert (choice.index, choice.delta.content) == (1, "")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].bytes == [0xF0]


def test_only_the_last_chunk_has_usage_where_it_is_asked_for() -> None:
    exchange = read(stream=True, stream_options={"include_usage": True}, n=2)
    finals = [completed("a", 7, 3), completed("b", 7, 4)]
    before = [exchange.opening(CALL, 0), exchange.chunk(CALL, 1, event(0, "a")), exchange.closing(CALL, 1, finals[1])]
    assert [chunk["usage"] for chunk in before if chunk] == [None, None, None]
    last = exchange.usage_chunk(CALL, finals)
    assert (last["choices"], last["usage"]) == ([], read(n=2).answer(CALL, finals)["usage"])


def test_no_chunk_has_usage_where_it_is_not_asked_for() -> None:
    exchange = read(stream=True)
    for chunk in (
        exchange.opening(CALL, 0),
        exchange.chunk(CALL, 0, event(0, "a")),
        exchange.closing(CALL, 0, completed()),
    ):
        assert chunk is not None
        assert "usage" not in chunk


def test_the_sdk_puts_the_chunks_together_to_the_plain_answer() -> None:
    fields = {"logprobs": True, "tools": [TOOL], "n": 2}
    tokens = [logprob("Hm", -0.5), logprob("So", -0.25), logprob("{", -0.125)]
    finals = [
        completed("So", reasoning_content="Hm", tool_calls=CALLS, logprobs=tokens, finish_reason="tool_calls"),
        completed("No", tokens=1, logprobs=[logprob("No")]),
    ]
    piece = {"index": 0, "function": {"name": None, "arguments": '{"q": '}, "id": None, "type": None}
    named = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": ""}}
    events = [
        (0, event(0, "", reasoning_content="Hm", logprobs=tokens[0])),
        (1, event(0, "No", logprobs=logprob("No"))),
        (0, event(1, "So", tool_calls=[named], logprobs=tokens[1])),
        (0, event(2, "", tool_calls=[piece], logprobs=tokens[2])),
        (0, event(3, "", None, tool_calls=[{"index": 0, "function": {"arguments": '"é"}'}}])),
    ]
    exchange = read(stream=True, stream_options={"include_usage": True}, **fields)
    chunks = [exchange.opening(CALL, choice) for choice in (0, 1)]
    chunks += [found for choice, data in events if (found := exchange.chunk(CALL, choice, data))]
    chunks += [exchange.closing(CALL, choice, final) for choice, final in enumerate(finals)]
    chunks += [exchange.usage_chunk(CALL, finals)]
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    joined = state.get_final_completion()
    plain = ChatCompletion.model_validate(read(**fields).answer(CALL, finals))
    assert joined.usage == plain.usage
    for one, other in zip(joined.choices, plain.choices, strict=True):
        assert (one.index, one.finish_reason, one.message.content) == (
            other.index,
            other.finish_reason,
            other.message.content,
        )
        assert one.logprobs and other.logprobs
        assert one.logprobs.content == other.logprobs.content
        assert getattr(one.message, "reasoning_content", None) == getattr(other.message, "reasoning_content", None)
    streamed: list[Any] = [call.to_dict() for call in joined.choices[0].message.tool_calls or ()]
    # The SDK leaves the place of a call, and what it made of the arguments, in what it puts together.
    assert [{key: call[key] for key in ("id", "type")} for call in streamed] == [{"id": "call_1", "type": "function"}]
    assert streamed[0]["function"]["name"] == "look_up"
    assert streamed[0]["function"]["arguments"] == CALLS[0]["function"]["arguments"]
