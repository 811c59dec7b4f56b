"""From a payload on the queue to a `Request` the engine can admit: check, render, tokenise, compile.

It uses the vocabulary alone, never the model's context, and may be called from any thread. It also answers the
web side's questions, so that a bad request is refused before it is queued.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from shared.ask import Question
from shared.errors import (
    ChatTemplateError,
    ContextLengthExceeded,
    InvalidRequest,
    SlotlineError,
    UnsupportedCapability,
    UnsupportedSchema,
)
from shared.records import NO_TIME, SlotTime
from shared.schemas import GenerationRequest, Message, Tool
from shared.settings import WorkerSettings
from shared.validation import invalid
from worker.answer import AnswerFormat, marks_of
from worker.backend import ModelInfo, SamplingParams, Vocabulary
from worker.chat import ChatPrompt, ChatTemplate
from worker.plain_text import with_bos
from worker.requests import Logprob, Request
from worker.shaping import constraint_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked payload: everything a `Request` needs except whose it is."""

    body: GenerationRequest
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    format: AnswerFormat | None = None


class Intake:
    """Prepares requests for one model.

    Attributes:
        template: the model's chat template; None where it has none, or serves embeddings.
        capabilities: what the model serves: `embeddings` alone, or `completion`, `chat`, `tools`, `thinking`,
            `json_schema`, `grammar`.
    """

    def __init__(self, settings: WorkerSettings, info: ModelInfo, vocab: Vocabulary) -> None:
        """Compile the chat template, and the default grammar if there is one.

        Raises:
            ChatTemplateError: the template does not parse.
            OSError: its file cannot be read.
            InvalidGrammar: the grammar does not compile.
        """
        self._settings = settings
        self._info = info
        self._vocab = vocab
        self._embeds = settings.pooling != "none"
        source = settings.chat_template.read_text("utf-8") if settings.chat_template else info.chat_template
        self.template = ChatTemplate(source, vocab) if source and not self._embeds else None
        chat = self.template.capabilities if self.template else ()
        answers = ("completion", *chat, "json_schema", "grammar")
        self.capabilities: tuple[str, ...] = ("embeddings",) if self._embeds else answers
        if settings.grammar:
            vocab.check_grammar(settings.grammar, settings.grammar_root)

    def prepare(self, payload: dict[str, Any], seed_source: str = "") -> Prepared:
        """Check a payload and turn its prompt into tokens.

        A request without a seed gets one made from `seed_source`, so that the same job draws the same tokens
        when it is resumed.

        Raises:
            InvalidRequest: or one of its kinds, naming the field.
        """
        body = parse(payload)
        self._check_kind(body)
        if body.embed:
            return self._embedding(body)
        prompt = self._prompt(body)
        format = self._format(body, prompt)
        max_tokens = self._max_tokens(body, len(prompt.tokens))
        params = self._params(body, seed_source, self._constraint(body, format, prompt))
        return Prepared(body, tuple(prompt.tokens), max_tokens, params, format)

    def request(
        self,
        prepared: Prepared,
        job_id: str,
        execution: str,
        *,
        generated: Sequence[int] = (),
        logged_logprobs: Sequence[Logprob] = (),
        has_started: bool = False,
        slot_time: SlotTime = NO_TIME,
        waited_s: float = 0.0,
        start_by: float | None = None,
        priority: int = 1,
        rank: int | None = None,
        queue: str = "",
    ) -> Request:
        """The engine's request for a prepared payload; see `Request` for what is given beside it."""
        body = prepared.body
        return Request(
            id=job_id,
            execution=execution,
            prompt=prepared.prompt,
            params=prepared.params,
            max_tokens=prepared.max_tokens,
            generated=tuple(generated),
            logged_logprobs=tuple(logged_logprobs),
            has_started=has_started,
            used_s=slot_time.used_s,
            prompt_s=slot_time.prompt_s,
            stop=body.stop_strings,
            timeout_s=body.timeout_s or self._settings.timeout_s,
            cache_prompt=self._settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
            stream=body.stream,
            format=prepared.format and replace(prepared.format, call_id=_call_id(job_id)),
            logprobs=body.logprobs,
            embed=body.embed,
            waited_s=waited_s,
            start_by=start_by,
            priority=priority,
            rank=rank,
            queue=queue,
        )

    def answer(self, question: Question) -> dict[str, Any]:
        """Answer a question of the web side; a refusal comes back as `{"error": …}`."""
        try:
            if question.kind == "check":
                prepared = self.prepare(question.body["request"])
                return {"prompt_tokens": len(prepared.prompt), "max_tokens": prepared.max_tokens}
            if question.kind == "tokenize":
                return {"tokens": self._tokenize(question.body)}
            return {"content": self._detokenize(question.body["tokens"])}
        except SlotlineError as error:
            return {"error": error.to_dict()}

    def _tokenize(self, body: dict[str, Any]) -> list[int]:
        tokens = self._vocab.tokenize(body["content"], parse_special=body.get("parse_special", False))
        return with_bos(self._vocab, tokens) if body.get("add_special") else tokens

    def _detokenize(self, tokens: Sequence[int]) -> str:
        self._check_ids(tokens, "tokens")
        return b"".join(map(self._vocab.piece, tokens)).decode("utf-8", "replace")

    def _check_kind(self, body: GenerationRequest) -> None:
        if body.embed and not self._embeds:
            raise UnsupportedCapability("this worker makes no embeddings; start one with --pooling", "embed")
        if self._embeds and not body.embed:
            raise UnsupportedCapability("this worker makes embeddings only; start one without --pooling", "model")

    def _embedding(self, body: GenerationRequest) -> Prepared:
        prompt, limit = self._raw(body.prompt), min(self._info.max_request_tokens, self._info.n_batch)
        if isinstance(body.prompt, str) and self._vocab.closing is not None:
            prompt = [*prompt, self._vocab.closing]
        if len(prompt) > limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; an embedding is made of at most {limit}", "prompt"
            )
        return Prepared(body, tuple(prompt), 0, SamplingParams())

    def _prompt(self, body: GenerationRequest) -> ChatPrompt:
        if body.messages is None:
            return ChatPrompt(self._raw(body.prompt), "free")
        if self.template is None:
            raise ChatTemplateError(
                "the model has no chat template; start its worker with --chat-template, or give `prompt`", "messages"
            )
        tools = [_shown(tool) for tool in _offered(body)]
        return self.template.prompt([_turn(m) for m in body.messages], tools, body.chat_template_kwargs)

    def _raw(self, prompt: str | list[int] | None) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._vocab.tokenize(prompt, parse_special=True)
            if not tokens:
                raise InvalidRequest("`prompt` has no tokens", "prompt")
            return with_bos(self._vocab, tokens)
        assert prompt is not None
        self._check_ids(prompt, "prompt")
        return list(prompt)

    def _format(self, body: GenerationRequest, prompt: ChatPrompt) -> AnswerFormat | None:
        """How the answer is to be taken apart. A grammar holds for all that the model writes, so all of it is text."""
        if body.messages is None or self.template is None or self._grammar(body) is not None:
            return None
        tools = _offered(body)
        syntax = self.template.tool_syntax if tools else None
        reasoning = self.template.reasoning
        if syntax is None and reasoning is None:
            return None
        marks = (*(reasoning or ()), *(syntax.marks if syntax else ()))
        return AnswerFormat(
            reasoning=reasoning,
            reasoning_open=prompt.thinking == "open",
            tools=syntax,
            functions=frozenset(tool.function.name for tool in tools),
            marks=marks_of(self._vocab, marks),
        )

    def _constraint(self, body: GenerationRequest, format: AnswerFormat | None, prompt: ChatPrompt) -> str | None:
        constraint = constraint_of(body, self._vocab, format, prompt.thinking)
        if constraint is not None:
            try:
                self._vocab.check_constraint(constraint)
            except UnsupportedSchema as error:
                error.param = error.param or ("response_format" if body.response_format else "tools")
                raise
        return constraint

    def _grammar(self, body: GenerationRequest) -> str | None:
        """The request's grammar; the worker's own holds for requests that bring neither a form nor tools."""
        bound = body.schema_of_answer is not None or _offered(body)
        return body.grammar or (None if bound else self._settings.grammar or None)

    def _check_ids(self, tokens: Sequence[int], param: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab.n_tokens:
                raise InvalidRequest(f"token id {token} is outside 0 to {self._vocab.n_tokens - 1}", param)

    def _max_tokens(self, body: GenerationRequest, prompt_tokens: int) -> int:
        limit = self._info.max_request_tokens
        cap = self._settings.max_tokens_cap
        if cap and (body.max_tokens or 0) > cap:
            raise InvalidRequest(f"`max_tokens` {body.max_tokens} is above the cap of {cap}", "max_tokens")
        room = limit - prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens; with at least 1 to generate a request may use {limit}",
                "prompt",
            )
        if body.max_tokens is None:
            wanted = room if body.fill_context else self._settings.max_tokens
            return min(wanted, room, cap or room)
        if body.max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens and `max_tokens` is {body.max_tokens}; "
                f"together a request may use {limit}",
                "max_tokens",
            )
        return body.max_tokens

    def _params(self, body: GenerationRequest, seed_source: str, constraint: str | None) -> SamplingParams:
        s = self._settings
        bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
        self._check_ids([token for token, _ in bias], "logit_bias")
        seed = _or(body.seed, s.seed)
        grammar = self._grammar(body)
        root = body.grammar_root or s.grammar_root
        if grammar is not None:
            self._vocab.check_grammar(grammar, root)
        return SamplingParams(
            temperature=_or(body.temperature, s.temp),
            top_k=_or(body.top_k, s.top_k),
            top_p=_or(body.top_p, s.top_p),
            min_p=_or(body.min_p, s.min_p),
            seed=_seed_of(seed_source) if seed == -1 else seed,
            repeat_penalty=_or(body.repeat_penalty, s.penalty_repeat),
            frequency_penalty=_or(body.frequency_penalty, s.penalty_freq),
            presence_penalty=_or(body.presence_penalty, s.penalty_present),
            logit_bias=bias,
            ignore_eos=body.ignore_eos,
            grammar=grammar,
            grammar_root=root,
            constraint=constraint,
        )


def parse(payload: dict[str, Any]) -> GenerationRequest:
    """A payload as `GenerationRequest`.

    Raises:
        InvalidRequest: names the first bad field.
    """
    try:
        return GenerationRequest.model_validate(payload)
    except ValidationError as error:
        raise invalid(error, GenerationRequest.model_fields) from None


def _offered(body: GenerationRequest) -> list[Tool]:
    """The tools the model is told of: none where it may not call any."""
    return [] if body.tool_choice == "none" else body.tools or []


def _shown(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it. Without parameters it is a function that has none."""
    shown = tool.function.model_dump(include={"name", "description"}, exclude_none=True)
    shown["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


def _turn(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: without what was left out."""
    turn = message.model_dump(exclude={"content"}, exclude_none=True)
    if not message.tool_calls:
        turn.pop("tool_calls", None)
    return {"role": turn.pop("role"), "content": message.text, **turn}


def _call_id(job_id: str) -> str:
    return "call_" + hashlib.sha256(job_id.encode()).hexdigest()[:20]


def _seed_of(source: str) -> int:
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4])


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
