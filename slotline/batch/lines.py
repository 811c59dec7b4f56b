"""What a line of the input asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slotline.batch.problems import BadLine, Problem
from slotline.batch.reading import Record, Source
from slotline.batch.template import Template

Kind = Literal["plain", "openai"]

JOBS, CHAT, COMPLETIONS, EMBEDDINGS = "/v1/jobs", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

#: What an OpenAI batch line may ask for.
ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)

#: Longest `custom_id`, in characters.
CUSTOM_ID_CHARS = 512

#: Fields that a plain JSONL line may bring beside its prompt: what a job may say of its answer.
LINE_OPTIONS = frozenset(
    (
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "repeat_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "grammar",
        "grammar_root",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "ignore_eos",
        "logprobs",
    )
)


@dataclass(frozen=True, slots=True)
class Rules:
    """How the command makes requests of lines.

    `options` are fields of `POST /v1/jobs` for every line that does not say otherwise; `model` is every line's, also
    of those that say otherwise. The seed of a line is `line_seed(seed, line)`; with -1 the server chooses.
    """

    template: Template | None = None
    system: str | None = None
    chat: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """A line that can be sent: `body` goes to `endpoint`. `fields` is the line as it was read."""

    number: int
    fields: dict[str, Any]
    endpoint: str
    body: dict[str, Any]
    custom_id: str | None = None

    @property
    def prompt_text(self) -> str:
        """The texts of the prompt, to count their tokens; token ids count as they are and are left out."""
        parts = self.body.get("messages") or self.body.get("prompt") or self.body.get("input") or ""
        return "\n".join(_texts(parts))


def line_seed(seed: int, number: int) -> int:
    """The seed of one line: 63 bits of the SHA-256 of `SEED:LINE`, so that no two lines draw alike."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8]) >> 1


def content_hash(fields: dict[str, Any]) -> bytes:
    """16 bytes that stand for a line's own fields, in their order."""
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).digest()


class LineReader:
    """The lines of a source under one set of rules. All are of the kind of the first: plain, or OpenAI's."""

    def __init__(self, source: Source, rules: Rules) -> None:
        self._source = source
        self._rules = rules
        self._first: tuple[Kind, int] | None = None
        self._plain_only = source.is_table or rules.template is not None

    @property
    def kind(self) -> Kind | None:
        """What the lines are; None before the first."""
        return self._first[0] if self._first else None

    def __iter__(self) -> Iterator[Line | Problem]:
        """Every line in order, a `Problem` in the place of a broken one.

        Raises:
            BadInput: nothing more can be read.
        """
        for record in self._source.records():
            if isinstance(record, Problem):
                yield record
                continue
            try:
                yield self._line(record)
            except BadLine as error:
                yield Problem(record.number, str(error))

    def _line(self, record: Record) -> Line:
        kind: Kind = "plain" if self._plain_only or not _is_openai(record.fields) else "openai"
        first, number = self._first or (kind, record.number)
        if kind != first:
            names = {"plain": "a plain line", "openai": "an OpenAI batch line"}
            raise BadLine(f"is {names[kind]}, while line {number} is {names[first]}: one file holds one kind")
        line = _openai(record, self._rules) if kind == "openai" else self._plain(record)
        self._first = (first, number)
        return line

    def _plain(self, record: Record) -> Line:
        rules, fields = self._rules, record.fields
        own = {} if self._plain_only else {name: fields[name] for name in LINE_OPTIONS & fields.keys()}
        body = {**rules.options, **{name: value for name, value in own.items() if value is not None}}
        if "grammar" in own or "response_format" in own:
            _keep_own_form(body, own)
        body |= _prompt(fields, rules)
        if rules.seed >= 0:
            body.setdefault("seed", line_seed(rules.seed, record.number))
        if rules.model is not None:
            body["model"] = rules.model
        return Line(record.number, fields, JOBS, body)


def _is_openai(fields: dict[str, Any]) -> bool:
    return not fields.keys() & {"prompt", "messages"} and bool(fields.keys() & {"custom_id", "url", "body"})


def _prompt(fields: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """The `prompt` or the `messages` of a plain line."""
    if rules.template is not None:
        prompt: Any = rules.template.fill(fields)
    elif "prompt" in fields and "messages" in fields:
        raise BadLine("has both `prompt` and `messages`")
    elif "messages" in fields:
        return {"messages": _with_system(fields["messages"], rules.system)}
    elif "prompt" in fields:
        prompt = fields["prompt"]
    else:
        there = ", ".join(map(repr, list(fields)[:20])) or "none"
        raise BadLine(
            f"has neither `prompt`, `messages` nor `body`; --template makes a prompt of its fields, which are {there}"
        )
    if not rules.chat and rules.system is None:
        return {"prompt": prompt}
    return {"messages": _with_system([{"role": "user", "content": prompt}], rules.system)}


def _with_system(messages: Any, system: str | None) -> Any:
    """The conversation with the command's system message first, unless it has one of its own."""
    if system is None or not isinstance(messages, list) or not messages:
        return messages
    first = messages[0]
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _keep_own_form(body: dict[str, Any], own: dict[str, Any]) -> None:
    """A line that says what form its answer has does not get the command's beside it."""
    for name in ("grammar", "grammar_root", "response_format"):
        if own.get(name) is None:
            body.pop(name, None)


def _openai(record: Record, rules: Rules) -> Line:
    fields = record.fields
    custom_id, url, body = _checked(fields)
    body = dict(body)
    if rules.system is not None:
        if url != CHAT:
            raise BadLine(f"asks for {url}, which takes no --system")
        body["messages"] = _with_system(body.get("messages"), rules.system)
    if url != EMBEDDINGS:
        _fill(body, rules, record.number)
    if rules.model is not None:
        body["model"] = rules.model
    return Line(record.number, fields, url, body, custom_id)


def _fill(body: dict[str, Any], rules: Rules, number: int) -> None:
    given = {name for name, value in body.items() if value is not None}
    options = dict(rules.options)
    if "max_completion_tokens" in given:
        options.pop("max_tokens", None)
    if given & {"grammar", "response_format"}:
        for name in ("grammar", "grammar_root", "response_format"):
            options.pop(name, None)
    body.update({name: value for name, value in options.items() if name not in given})
    if rules.seed >= 0 and "seed" not in given:
        body["seed"] = line_seed(rules.seed, number)


def _checked(fields: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """`custom_id`, `url` and `body` of an OpenAI line whose structure is whole."""
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine("needs a `custom_id`, which is a text that is not empty")
    if len(custom_id) > CUSTOM_ID_CHARS:
        raise BadLine(f"has a `custom_id` of {len(custom_id)} characters; at most {CUSTOM_ID_CHARS} are allowed")
    if fields.get("method") != "POST":
        raise BadLine("needs the `method` POST")
    if url not in ENDPOINTS:
        raise BadLine(f"has the `url` {url!r}; it must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        raise BadLine("needs a `body`, which is an object")
    if body.get("stream"):
        raise BadLine("asks for `stream`, which a batch has no use for")
    return custom_id, str(url), body


def _texts(parts: Any) -> Iterator[str]:
    """Every text in a prompt, a list of messages or an input, as deep as they go."""
    if isinstance(parts, str):
        yield parts
    elif isinstance(parts, list):
        for part in parts:
            yield from _texts(part)
    elif isinstance(parts, dict):
        yield from _texts(parts.get("content") or parts.get("text") or "")
