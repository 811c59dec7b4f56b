"""The `openai` package and LangChain, as their users drive them, against real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.integration.conftest import Stack
from tests.processes import eventually
from worker.demo import demo_model_path

pytestmark = pytest.mark.integration

TEMPLATES = Path(__file__).parent.parent / "worker" / "templates"

WEATHER: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Animal(BaseModel):
    """What a model is asked to fill in."""

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


@pytest.fixture(scope="module")
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.web().url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def echo(stack: Stack) -> str:
    stack.worker(model="fake:echo", name="echo", chat_template=TEMPLATES / "qwen3.jinja", n_ctx=65536)
    return "echo"


@pytest.fixture(scope="module")
def demo(stack: Stack) -> str:
    stack.worker(model=str(demo_model_path()), name="demo", n_parallel=4, n_ctx=4096)
    return "demo"


@pytest.mark.model
def test_chat_answers_with_text_usage_and_a_finish_reason(sdk: openai.OpenAI, demo: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    answer = sdk.chat.completions.create(model=demo, messages=messages, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert answer.object == "chat.completion" and answer.model == demo
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.model
def test_a_streamed_chat_is_the_plain_one_in_pieces(sdk: openai.OpenAI, demo: str) -> None:
    body = {"model": demo, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12, "temperature": 0}
    plain = sdk.chat.completions.create(**body)  # type: ignore[call-overload]
    chunks = list(sdk.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens and chunks[-1].choices == []
    assert len({c.id for c in chunks}) == 1
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [plain.choices[0].finish_reason]


def test_several_choices_come_apart(sdk: openai.OpenAI, echo: str) -> None:
    messages = [{"role": "user", "content": "one two"}]
    answer = sdk.chat.completions.create(model=echo, messages=messages, n=3, temperature=0)  # type: ignore[arg-type]
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, "one two") for i in range(3)]


def test_logprobs_carry_the_true_bytes(sdk: openai.OpenAI, echo: str) -> None:
    answer = sdk.chat.completions.create(
        model=echo, messages=[{"role": "user", "content": "é!"}], logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert bytes(b for token in logprobs.content for b in token.bytes or ()) == "é!".encode()
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs.content)


def test_tools_are_called_plain_and_streamed(sdk: openai.OpenAI, echo: str) -> None:
    messages = [{"role": "user", "content": CALL}]
    plain = sdk.chat.completions.create(model=echo, messages=messages, tools=[WEATHER], temperature=0)  # type: ignore[arg-type]
    choice = plain.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    with sdk.chat.completions.stream(model=echo, messages=messages, tools=[WEATHER], temperature=0) as stream:  # type: ignore[arg-type]
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None
    assert (streamed[0].function.name, streamed[0].function.arguments) == ("weather", call.function.arguments)


def test_a_tool_that_has_to_be_called_is(sdk: openai.OpenAI, echo: str) -> None:
    answer = sdk.chat.completions.create(
        model=echo,
        messages=[{"role": "user", "content": "hello"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
        max_tokens=200,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None and calls[0].type == "function" and calls[0].function.name == "weather"
    assert set(json.loads(calls[0].function.arguments)) == {"city"}


def test_reasoning_is_apart_from_the_answer(sdk: openai.OpenAI, echo: str) -> None:
    messages = [{"role": "user", "content": "<think>hm</think>yes"}]
    answer = sdk.chat.completions.create(model=echo, messages=messages, temperature=0)  # type: ignore[arg-type]
    message = answer.choices[0].message
    assert (message.content, message.model_extra and message.model_extra["reasoning_content"]) == ("yes", "hm")


@pytest.mark.model
def test_parse_gives_an_object_of_the_schema(sdk: openai.OpenAI, demo: str) -> None:
    answer = sdk.chat.completions.parse(
        model=demo,
        messages=[{"role": "user", "content": "Describe a cat as JSON."}],
        response_format=Animal,
        temperature=0,
        max_tokens=60,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Animal)
    assert answer.choices[0].finish_reason == "stop"


def test_completions_take_lists_of_prompts_and_token_ids(sdk: openai.OpenAI, echo: str) -> None:
    texts = sdk.completions.create(model=echo, prompt=["one", "two"], max_tokens=3, temperature=0)
    assert [c.text for c in texts.choices] == ["one", "two"]
    ids = sdk.completions.create(model=echo, prompt=[104, 105], max_tokens=2, temperature=0)
    assert ids.choices[0].text == "hi"


def test_errors_are_the_sdks_own(sdk: openai.OpenAI, echo: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.chat.completions.create(model=echo, messages=messages, temperature=99)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="nobody"):
        sdk.chat.completions.create(model="nobody", messages=messages)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="prediction"):
        sdk.chat.completions.create(model=echo, messages=messages, prediction={"type": "content", "content": "x"})  # type: ignore[arg-type]


def test_models_can_be_listed_and_retrieved(sdk: openai.OpenAI, echo: str) -> None:
    assert echo in [model.id for model in sdk.models.list()]
    assert sdk.models.retrieve(echo).id == echo
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nobody")


@pytest.mark.model
def test_embeddings_come_as_floats_or_base64_of_any_size(sdk: openai.OpenAI, stack: Stack) -> None:
    stack.worker(model=str(demo_model_path()), name="vectors", pooling="mean", n_ctx=2048)
    texts = ["a cat", "a dog"]
    plain = sdk.embeddings.create(model="vectors", input=texts, encoding_format="float")
    packed = sdk.embeddings.create(model="vectors", input=texts)  # the SDK asks for base64
    small = sdk.embeddings.create(model="vectors", input=texts, dimensions=8, encoding_format="float")
    assert [d.index for d in plain.data] == [0, 1] and plain.usage.prompt_tokens > 0
    assert packed.data[1].embedding == pytest.approx(plain.data[1].embedding, abs=1e-3)
    assert [len(d.embedding) for d in small.data] == [8, 8]
    assert sum(x * x for x in small.data[0].embedding) == pytest.approx(1, abs=1e-3)


def test_a_batch_lives_its_whole_life(sdk: openai.OpenAI, echo: str, stack: Stack) -> None:
    stack.service("batches")
    lines = [
        {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": echo, "messages": [{"role": "user", "content": f"number {i}"}], "temperature": 0},
        }
        for i in range(5)
    ]
    lines[3]["body"]["temperature"] = 99  # type: ignore[index]
    content = "\n".join(map(json.dumps, lines)).encode()
    given = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    assert sdk.files.content(given.id).read() == content
    batch = sdk.batches.create(
        input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "1"}
    )
    eventually(lambda: sdk.batches.retrieve(batch.id).status == "completed", "the batch is completed")
    done = sdk.batches.retrieve(batch.id)
    counts = done.request_counts
    assert counts is not None and (counts.completed, counts.failed, counts.total) == (4, 1, 5)
    assert done.output_file_id is not None and done.error_file_id is not None
    rows = [json.loads(line) for line in sdk.files.content(done.output_file_id).read().splitlines()]
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
    assert answers == {f"request-{i}": f"number {i}" for i in (0, 1, 2, 4)}
    (failed,) = [json.loads(line) for line in sdk.files.content(done.error_file_id).read().splitlines()]
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("request-3", 400)
    assert batch.id in [b.id for b in sdk.batches.list()]
    sdk.files.delete(given.id)
    assert given.id not in [f.id for f in sdk.files.list()]


def test_langchain_invokes_and_streams(sdk: openai.OpenAI, echo: str) -> None:
    chat = ChatOpenAI(
        model=echo, base_url=str(sdk.base_url), api_key=SecretStr("none"), temperature=0, stream_usage=True
    )
    assert chat.invoke("one two three").content == "one two three"
    chunks = list(chat.stream("one two three"))
    assert "".join(str(chunk.content) for chunk in chunks) == "one two three"
    assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)


def test_langchain_binds_tools_and_schemas(sdk: openai.OpenAI, echo: str) -> None:
    chat = ChatOpenAI(
        model=echo,
        base_url=str(sdk.base_url),
        api_key=SecretStr("none"),
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    answer = chat.bind_tools([WEATHER]).invoke(CALL)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Oslo"})]  # type: ignore[attr-defined]
    found = chat.with_structured_output(Animal, method="json_schema").invoke("hello")
    assert isinstance(found, Animal)
