"""What `docs/compatibility.md` says holds of llama.cpp's server, tried over HTTP on the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Stack, StartWeb, StartWorker
from tests.processes import eventually
from worker.demo import demo_model_path

pytestmark = [pytest.mark.integration, pytest.mark.model]

PROMPT = "I believe the meaning of life is"
CHAT = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    stack.worker(model=str(demo_model_path()), name="demo", n_parallel=2, n_ctx=512)
    with httpx.Client(base_url=stack.web().url, timeout=60) as found:
        yield found


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with the one end mark."""
    lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(text) for text in data]


def test_completions_stream_what_they_answer_plain(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    plain = post(http, "/v1/completions", **body)["choices"][0]
    streamed = chunks(http, "/v1/completions", **body)
    assert "".join(c["choices"][0]["text"] for c in streamed) == plain["text"]
    assert streamed[-1]["choices"][0]["finish_reason"] == plain["finish_reason"] == "length"


def test_the_same_seed_gives_the_same_text_and_another_seed_another(http: httpx.Client) -> None:
    def text(seed: int, temperature: float) -> str:
        body = {"prompt": PROMPT, "max_tokens": 16, "seed": seed, "temperature": temperature, "cache_prompt": False}
        return str(post(http, "/v1/completions", **body)["choices"][0]["text"])

    assert len({text(42, 0.0) for _ in range(3)}) == 1
    assert len({text(seed, 1.0) for seed in range(4)}) == 4


def test_token_ids_are_the_same_prompt_as_their_text(http: httpx.Client) -> None:
    tokens = post(http, "/v1/tokenize", content=PROMPT, add_special=True)["tokens"]
    texts = [
        post(http, "/v1/completions", prompt=prompt, max_tokens=8, temperature=0)["choices"][0]["text"]
        for prompt in (PROMPT, tokens)
    ]
    assert texts[0] == texts[1]
    listed = post(http, "/v1/completions", prompt=[tokens, tokens], max_tokens=8, temperature=0)["choices"]
    assert [(c["index"], c["text"]) for c in listed] == [(0, texts[0]), (1, texts[0])]


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = http.post("/v1/chat/completions", json={"messages": CHAT * 100, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "512" in error["message"] and answer.headers["Content-Type"] == "application/json"


def test_without_a_length_an_answer_ends_with_the_context(http: httpx.Client) -> None:
    answer = post(http, "/v1/completions", prompt="one two " * 220, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


def test_the_first_chunk_alone_has_the_role_and_the_last_the_reason(http: httpx.Client) -> None:
    found = chunks(http, "/v1/chat/completions", messages=CHAT, max_tokens=8, temperature=0)
    deltas = [c["choices"][0]["delta"] for c in found]
    assert deltas[0]["role"] == "assistant" and not any("role" in d for d in deltas[1:])
    assert [c["choices"][0]["finish_reason"] for c in found] == [None] * (len(found) - 1) + ["length"]
    assert len({c["id"] for c in found}) == 1 and found[0]["id"].startswith("chatcmpl-")


def test_parts_of_content_are_one_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "the best book"}]
    whole = post(http, "/v1/chat/completions", messages=CHAT, max_tokens=4, temperature=0)
    apart = post(
        http,
        "/v1/chat/completions",
        messages=[CHAT[0], {"role": "user", "content": parts}],
        max_tokens=4,
        temperature=0,
    )
    assert apart["usage"] == whole["usage"] | {"prompt_tokens_details": apart["usage"]["prompt_tokens_details"]}
    assert apart["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]


def test_logprobs_join_to_the_text_plain_and_streamed(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 10}
    choice = post(http, "/v1/chat/completions", **body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 10 for token in content)
    streamed = [c["choices"][0] for c in chunks(http, "/v1/chat/completions", **body)]
    tokens = [token for c in streamed if c["logprobs"] for token in c["logprobs"]["content"]]
    assert [t["bytes"] for t in tokens] == [t["bytes"] for t in content]


def test_a_bias_keeps_tokens_out(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    free = post(http, "/v1/completions", **body, logprobs=0)["choices"][0]
    first = post(http, "/v1/tokenize", content=free["text"])["tokens"][0]
    biased = post(http, "/v1/completions", **body, logit_bias={str(first): -100})["choices"][0]
    assert biased["text"] != free["text"]
    assert post(http, "/v1/tokenize", content=biased["text"])["tokens"][0] != first


@pytest.mark.parametrize(
    ("response_format", "pattern"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, '"42"'),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, '"foooooo"'),
    ],
)
def test_a_schema_decides_the_answer(http: httpx.Client, response_format: dict[str, Any], pattern: str) -> None:
    answer = post(http, "/v1/chat/completions", messages=CHAT, response_format=response_format, max_tokens=20)
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (pattern, "stop")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "sound"},
        {"type": "json_object", "schema": 123},
        {"type": "json_object", "schema": {"type": 123}},
        {"type": "json_object", "schema": {"type": "hiccup"}},
    ],
)
def test_a_schema_that_is_none_is_refused(http: httpx.Client, response_format: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "response_format": response_format})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("response_format")


def test_a_grammar_decides_the_answer_and_a_bad_one_is_refused(http: httpx.Client) -> None:
    good = post(http, "/v1/chat/completions", messages=CHAT, grammar='root ::= "a"{5,5}', max_tokens=8)
    assert good["choices"][0]["message"]["content"] == "aaaaa"
    bad = http.post("/v1/chat/completions", json={"messages": CHAT, "grammar": "root ::= this is (not valid GBNF"})
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_grammar")


@pytest.mark.parametrize(
    "messages",
    [None, "string", [], [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [*CHAT, {}]],
)
def test_messages_that_are_none_are_refused(http: httpx.Client, messages: Any) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400 and "messages" in answer.json()["error"]["message"]


def test_a_call_that_is_given_up_frees_its_slot(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        job = f"/v1/jobs/{answer.headers['X-Slotline-Job-Id']}"
    eventually(lambda: http.get(job).json()["detail"] == "canceled", "its worker has let go of it")
    eventually(lambda: http.get("/v1/stats").json()["workers"][0]["active_slots"] == 0, "the slot is free")
    assert http.get(job).json()["status"] == "cancelled"


def test_stop_strings_are_left_out(http: httpx.Client) -> None:
    body = {"prompt": "1 2 3 4 5 6 7", "max_tokens": 32, "temperature": 0}
    whole = post(http, "/v1/completions", **body)["choices"][0]["text"]
    stop = whole[4:7]
    cut = post(http, "/v1/completions", **body, stop=[stop])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_text_to_tokens_and_back(http: httpx.Client) -> None:
    text = "This is a test string with unicode 媽 and emoji 🤗"
    tokens = post(http, "/v1/tokenize", content=text)["tokens"]
    assert post(http, "/v1/detokenize", tokens=tokens)["content"] == text


def test_cached_tokens_are_told_apart(start_worker: StartWorker, start_web: StartWeb) -> None:
    start_worker(model=str(demo_model_path()), name="demo", n_parallel=1, n_ctx=512, cache_prompt=True)
    with httpx.Client(base_url=start_web().url, timeout=60) as http:
        usages = [post(http, "/v1/chat/completions", messages=CHAT, max_tokens=2)["usage"] for _ in range(2)]
    total = usages[0]["prompt_tokens"]
    assert [u["prompt_tokens"] for u in usages] == [total, total]
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [0, total - 1]
