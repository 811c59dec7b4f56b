from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.client import Answer, CallFailed, complete

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **fields}).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return chunk(choices=[{"index": 0, "text": piece}])


USAGE = chunk(usage={"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}})
DONE = b"data: [DONE]\n\n"


def in_pieces(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def ask(reply: bytes, body: dict[str, Any]) -> tuple[Answer, bytes]:
    """The answer that is read from a server that says `reply`, and what that server was sent."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        heard.append(await reader.readuntil(b"}}"))
        writer.write(reply)
        writer.close()

    async def run() -> Answer:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await complete(f"http://127.0.0.1:{port}", body)

    return asyncio.run(run()), b"".join(heard)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_an_answer_is_the_same_however_its_bytes_are_cut(size: int) -> None:
    stream = b": connected\n\n" + text("a") + text("") + text("b") + text("c") + USAGE + DONE
    answer, sent = ask(in_pieces(stream, size), {"prompt": "hi"})
    assert sent.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert (answer.text, answer.chunks, len(answer.gap_s)) == ("abc", 3, 2)
    assert (answer.prompt_tokens, answer.generated_tokens, answer.cached_tokens) == (5, 3, 4)
    assert 0 < answer.ttft_s <= answer.total_s


def test_a_chat_is_read_from_its_deltas() -> None:
    stream = chunk(choices=[{"delta": {"role": "assistant", "content": ""}}])
    stream += chunk(choices=[{"delta": {"content": "a"}}]) + USAGE + DONE
    answer, sent = ask(in_pieces(stream, 50), {"messages": [{"role": "user", "content": "hi"}]})
    assert sent.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert (answer.text, answer.chunks) == ("a", 1)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            lambda: b"HTTP/1.1 429 Too Many Requests\r\n\r\nthe queue is full",
            "429 Too Many Requests: the queue",
        ),
        (lambda: in_pieces(text("a") + chunk(error={"message": "dead end"}), 100), "dead end"),
        (lambda: in_pieces(text("a") + USAGE, 100), "without \\[DONE\\]"),
        (lambda: in_pieces(text("a") + DONE, 100), "without its usage"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure(reply: Callable[[], bytes], message: str) -> None:
    with pytest.raises(CallFailed, match=message):
        ask(reply(), {"prompt": "hi"})
