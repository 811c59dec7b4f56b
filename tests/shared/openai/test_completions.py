from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion

from shared.errors import InvalidRequest
from shared.openai.completions import CompletionExchange, CompletionRequest, TextOffsets, read_completion
from shared.openai.exchange import Exchange
from tests.shared.openai.ended import CALL, completed, event, logprob


def read(prompt: Any = "Once", **fields: Any) -> CompletionExchange:
    return read_completion(json.dumps({"prompt": prompt, **fields}).encode())


def refusal(prompt: Any = "Once", **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(prompt, **fields)
    return caught.value


# --- bodies ---


def test_the_shortest_body_is_one_interactive_job_with_the_rest_of_the_context() -> None:
    (job,) = read().jobs()
    assert job.payload() == {"prompt": "Once", "fill_context": True}
    assert job.priority == "interactive"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once", ["Once"]),
        (["Once"], ["Once"]),
        (["Once", "Twice", "Once"], ["Once", "Twice", "Once"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_prompt_is_answered_in_its_place(prompt: Any, prompts: list[Any]) -> None:
    assert [job.prompt for job in read(prompt).jobs()] == prompts


def test_the_choices_of_a_prompt_stand_together_with_seeds_of_their_own() -> None:
    jobs = read(["Once", "Twice"], n=3, seed=5).jobs()
    assert [(job.prompt, job.seed) for job in jobs] == [
        ("Once", 5), ("Once", 6), ("Once", 7), ("Twice", 5), ("Twice", 6), ("Twice", 7),
    ]  # fmt: skip


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    names = set(CompletionRequest.model_fields) - {"prompt"}
    assert read(**dict.fromkeys([*names, "echo", "suffix"])).jobs() == read().jobs()


def test_best_of_may_only_ask_for_what_is_given_back_anyway() -> None:
    assert len(read(n=2, best_of=2).jobs()) == 2
    assert len(read(best_of=1).jobs()) == 1
    assert refusal(n=2, best_of=3).param == "best_of"
    assert refusal(n=2, best_of=1).param == "best_of"


@pytest.mark.parametrize("logprobs", [0, 5])
def test_logprobs_are_a_number_of_likely_tokens(logprobs: int) -> None:
    assert read(logprobs=logprobs).jobs()[0].logprobs == logprobs


def test_a_format_may_be_asked_for_as_of_a_chat() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert read(response_format=form).jobs()[0].schema_of_answer == {"type": "object"}


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "is empty"),
        ([], "the list is empty"),
        (["a", ""], "item 1 is empty"),
        ([[1], []], "item 1 is an empty list of token ids"),
        ([1, "a"], "has 'a' at place 1, which is no token id"),
        ([1, -1], "has -1 at place 1"),
        ([1, 2**31], "has 2147483648 at place 1"),
        ([1.0], "has 1.0 at place 0"),
        ([True], "has True at place 0"),
        ([[1], [2, None]], "item 1 has None at place 1"),
        (["a", [1]], "has texts and lists of token ids"),
        (["a", 5], "item 1 is neither text nor a list of token ids"),
        (["a", None], "item 1 is neither"),
        ([None], "item 0 is neither"),
        ([{}], "item 0 is neither"),
        (5, "is neither text nor a list of token ids"),
        ({}, "is neither text"),
        (None, "is required"),
    ],
)
def test_a_bad_prompt_is_named_with_its_place(prompt: Any, says: str) -> None:
    error = refusal(prompt)
    assert error.param == "prompt"
    assert error.message.startswith("`prompt`")
    assert says in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 6), ("logprobs", -1), ("logprobs", True), ("n", 0), ("n", 129), ("max_tokens", 0),
        ("max_tokens", "5"), ("temperature", float("nan")), ("top_p", 2), ("best_of", 0), ("best_of", "1"),
        ("stop", ""), ("metadata", 5), ("stream_options", {}), ("suffix", "x"), ("echo", True), ("tools", []),
        ("messages", []),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert f"`{field}`" in error.message


def test_a_call_has_at_most_2048_choices() -> None:
    assert len(read(["a"] * 16, n=128).jobs()) == 2048
    error = refusal(["a"] * 17, n=128)
    assert (error.param, error.message) == ("prompt", "`prompt` and `n` make 2176 choices, more than 2048")


# --- answers ---


def test_an_answer_is_what_the_sdk_parses() -> None:
    found = read().answer(CALL, [completed(" upon", 2, 1, 1, finish_reason="length")])
    assert found == {
        "id": "cmpl-abc",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [{"index": 0, "text": " upon", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 1,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert Completion.model_validate(found, strict=True).choices[0].text == " upon"


def test_choices_are_numbered_through_and_each_prompt_counts_once() -> None:
    finals = [completed("a", 2, 1, 0), completed("b", 2, 2, 2), completed("c", 5, 3, 4), completed("d", 5, 4, 3)]
    found = Completion.model_validate(read(["Once", "Twice"], n=2).answer(CALL, finals), strict=True)
    assert [(choice.index, choice.text) for choice in found.choices] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (7, 10, 17)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 3


TOKENS = [
    logprob("a", -0.5, top=[("b", -0.25), ("a", -0.5)]),
    logprob("\ufffd", -1.0, b"\xc3", top=[("b", -0.75)]),
    logprob("\ufffd", -0.1, b"\xa9"),
    logprob(" c", -0.2, top=[(" c", -0.2), (" c", -3.0)]),
]


def test_log_probabilities_have_the_older_format_with_the_chosen_token_among_the_likely() -> None:
    found = read(logprobs=2).answer(CALL, [completed("aé c", logprobs=TOKENS)])
    parsed = Completion.model_validate(found, strict=True).choices[0].logprobs
    assert parsed is not None
    assert parsed.tokens == ["a", "\ufffd", "\ufffd", " c"]
    assert parsed.token_logprobs == [-0.5, -1.0, -0.1, -0.2]
    assert parsed.top_logprobs == [
        {"b": -0.25, "a": -0.5},
        {"b": -0.75, "\ufffd": -1.0},
        {"\ufffd": -0.1},
        {" c": -0.2},
    ]
    assert parsed.text_offset == [0, 1, 1, 2]


def test_offsets_count_characters_and_give_half_ones_to_the_token_that_ends_them() -> None:
    offsets = TextOffsets()
    assert [offsets.next(piece) for piece in (b"a\xf0\x9f", b"\x98\x80", "é".encode(), b"\xff", b"z")] == [
        0,
        1,
        2,
        3,
        4,
    ]


# --- chunks ---


def test_a_stream_gives_the_plain_answers_text_and_log_probabilities() -> None:
    exchange = read(stream=True, logprobs=2, n=2)
    texts = ["a", "", "é", " c"]
    other = exchange.chunk(CALL, 1, event(0, "zz", logprobs=logprob("zz")))
    chunks = [exchange.chunk(CALL, 0, event(i, texts[i], logprobs=TOKENS[i])) for i in range(4)]
    assert other is not None
    parsed = [Completion.model_validate(chunk | {"choices": []}) for chunk in chunks if chunk]
    assert {(chunk.id, chunk.object, chunk.usage) for chunk in parsed} == {("cmpl-abc", "text_completion", None)}
    choices = [chunk["choices"][0] for chunk in chunks if chunk]
    (whole,) = read(logprobs=2).answer(CALL, [completed("aé c", logprobs=TOKENS)])["choices"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    joined = {key: [x for choice in choices for x in choice["logprobs"][key]] for key in whole["logprobs"]}
    assert joined == whole["logprobs"]


def test_nothing_comes_before_the_first_token() -> None:
    exchange: Exchange = read(stream=True)
    assert exchange.opening(CALL, 0) is None


def test_a_token_that_shows_nothing_yet_is_no_chunk() -> None:
    assert read(stream=True).chunk(CALL, 0, event(0, "")) is None


def test_the_last_chunk_of_a_choice_has_the_reason() -> None:
    found = read(stream=True).closing(CALL, 3, completed("x", finish_reason="length"))
    assert found["choices"] == [{"index": 3, "text": "", "logprobs": None, "finish_reason": "length"}]


def test_only_the_last_chunk_has_usage_where_it_is_asked_for() -> None:
    exchange = read(["Once", "Twice"], stream=True, stream_options={"include_usage": True})
    finals = [completed("a", 7, 3), completed("b", 8, 4)]
    before = [exchange.chunk(CALL, 1, event(0, "a")), exchange.closing(CALL, 1, finals[1])]
    assert [chunk["usage"] for chunk in before if chunk] == [None, None]
    last = exchange.usage_chunk(CALL, finals)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 22)
    assert "usage" not in read(stream=True).closing(CALL, 0, finals[0])
