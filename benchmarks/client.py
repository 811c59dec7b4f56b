"""One streamed completion over HTTP, read by a client that costs little.

It shares the cores with the server that is measured, so it is no more than a socket and `json.loads`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class CallFailed(Exception):
    """The server refused a call, or its stream ended early. The message says what it said."""


@dataclass(slots=True)
class Answer:
    """What came back, and when: seconds since the call was sent. Token counts are the server's own `usage`."""

    text: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    gap_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0

    @property
    def chunks(self) -> int:
        """Pieces of text so far: one a token, but for those that are only a part of a character."""
        return len(self.gap_s) + bool(self.text)


async def complete(base_url: str, body: Mapping[str, Any], answer: Answer | None = None) -> Answer:
    """Send a completion, or a chat where the body has `messages`, and read its stream to the end.

    An `answer` that is given is filled as the text comes, for who wants to look at it meanwhile.

    Raises:
        CallFailed: there is no whole answer.
        OSError: the server cannot be reached.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    sent = dict(body) | {"stream": True, "stream_options": {"include_usage": True}}
    answer, usage = answer or Answer(), None
    began = last = time.perf_counter()
    async for data in _events(base_url, path, sent):
        chunk = json.loads(data)
        if "error" in chunk:
            raise CallFailed(str(chunk["error"]))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                now = time.perf_counter()
                if answer.text:
                    answer.gap_s.append(now - last)
                else:
                    answer.ttft_s = now - began
                last = now
                answer.text += text
    if usage is None:
        raise CallFailed("the stream ended without its usage")
    answer.total_s = time.perf_counter() - began
    answer.prompt_tokens, answer.generated_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer


async def _events(base_url: str, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """The data of each Server-Sent Event up to `[DONE]`."""
    address = urlsplit(base_url)
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(head.encode() + payload)
        status = (await reader.readline()).split(maxsplit=2)
        while (await reader.readline()).strip():
            pass  # headers
        if status[1:2] != [b"200"]:
            raise CallFailed(f"{b' '.join(status).decode().strip()}: {(await reader.read(500)).decode()}")
        rest = b""
        while size := int((await reader.readline()).strip() or b"0", 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            *frames, rest = rest.split(b"\n\n")
            for frame in frames:
                if frame == b"data: [DONE]":
                    return
                if frame.startswith(b"data: "):
                    yield frame[6:]
        raise CallFailed("the stream ended without [DONE]")
    finally:
        writer.close()
