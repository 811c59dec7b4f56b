from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from shared.errors import InvalidRequest
from shared.openai.embeddings import EmbeddingExchange, EmbeddingRequest, read_embeddings
from tests.shared.openai.ended import CALL, embedded

LONG = [0.5, -0.5, 0.5, 0.5]


def read(given: Any = "A dog", **fields: Any) -> EmbeddingExchange:
    return read_embeddings(json.dumps({"input": given, **fields}).encode())


def refusal(given: Any = "A dog", **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(given, **fields)
    return caught.value


def test_each_input_is_a_job_that_embeds() -> None:
    jobs = read(["A dog", "A cat"], model="tiny", user="ann").jobs()
    assert [job.payload() for job in jobs] == [
        {"model": "tiny", "prompt": prompt, "embed": True} for prompt in ("A dog", "A cat")
    ]
    assert {job.priority for job in jobs} == {"interactive"}
    assert [job.metadata for job in jobs] == [{"user": "ann"}] * 2


@pytest.mark.parametrize(("given", "count"), [("A dog", 1), (["A dog"], 1), ([1, 2], 1), ([[1, 2], [3]], 2)])
def test_input_is_text_or_token_ids_or_a_list_of_them(given: Any, count: int) -> None:
    assert len(read(given).jobs()) == count


def test_a_call_has_at_most_2048_inputs() -> None:
    assert len(read(["a"] * 2048).jobs()) == 2048
    assert refusal(["a"] * 2049).message == "`input` has 2049 items, more than 2048"


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    names = set(EmbeddingRequest.model_fields) - {"input"}
    exchange = read(**dict.fromkeys(names))
    assert exchange == read()
    assert not (exchange.stream or exchange.include_usage or exchange.background)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", ""), ("input", []), ("input", ["a", ""]), ("input", [[]]), ("input", None), ("input", 5),
        ("input", [1, "a"]), ("dimensions", 0), ("dimensions", -1), ("dimensions", "4"), ("encoding_format", "int8"),
        ("user", 5), ("stream", True), ("max_tokens", 5), ("priority", "urgent"), ("timeout_s", 0),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    error = refusal(**{"given" if field == "input" else field: value})
    assert error.param == field
    assert f"`{field}`" in error.message


def test_an_answer_is_what_the_sdk_parses() -> None:
    found = read(["a", "b"]).answer(CALL, [embedded(LONG, 4), embedded([1, 0, 0, 0], 5)])
    assert found == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": LONG},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.0, 0.0, 0.0]},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert CreateEmbeddingResponse.model_validate(found, strict=True).data[0].embedding == LONG


def test_base64_is_the_same_numbers_as_little_endian_floats() -> None:
    found = read(encoding_format="base64").answer(CALL, [embedded(LONG)])
    assert struct.unpack("<4f", base64.b64decode(found["data"][0]["embedding"])) == tuple(LONG)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_fewer_dimensions_are_the_first_ones_with_length_1_again(encoding: str) -> None:
    found = read(dimensions=2, encoding_format=encoding).answer(CALL, [embedded(LONG)])["data"][0]["embedding"]
    numbers = struct.unpack("<2f", base64.b64decode(found)) if encoding == "base64" else found
    assert numbers == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_dimensions_that_are_all_zero_stay_zero() -> None:
    assert read(dimensions=2).answer(CALL, [embedded([0, 0, 1])])["data"][0]["embedding"] == [0.0, 0.0]


def test_more_dimensions_than_the_model_has_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match="`dimensions` is 5; embeddings of this model have 4") as caught:
        read(dimensions=5).check(4)
    assert caught.value.param == "dimensions"
    with pytest.raises(InvalidRequest, match="have 4"):
        read(dimensions=5).answer(CALL, [embedded(LONG)])


@pytest.mark.parametrize(("dimensions", "n_embd"), [(4, 4), (5, None), (None, 4)])
def test_dimensions_that_may_be_there_pass(dimensions: int | None, n_embd: int | None) -> None:
    exchange = read(dimensions=dimensions)
    exchange.check(n_embd)
    assert exchange.dimensions == dimensions
