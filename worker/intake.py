"""From a payload on the queue to a `Request` the engine can admit: check, render, tokenise, compile.

It uses the vocabulary alone, never the model's context, and may be called from any thread. It also answers the
web side's questions, so that a bad request is refused before it is queued.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from shared.ask import Question
from shared.errors import ChatTemplateError, ContextLengthExceeded, InvalidRequest, SlotlineError
from shared.schemas import GenerationRequest
from shared.settings import WorkerSettings
from worker.backend import ModelInfo, SamplingParams, Vocabulary
from worker.chat import ChatTemplate, with_bos
from worker.requests import Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked payload: everything a `Request` needs except whose it is."""

    body: GenerationRequest
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams


class Intake:
    """Prepares requests for one model."""

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
        source = settings.chat_template.read_text("utf-8") if settings.chat_template else info.chat_template
        self.template = ChatTemplate(source, vocab) if source else None
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
        prompt = self._prompt(body)
        return Prepared(body, tuple(prompt), self._max_tokens(body, len(prompt)), self._params(body, seed_source))

    def request(
        self,
        prepared: Prepared,
        job_id: str,
        execution: str,
        *,
        generated: Sequence[int] = (),
        waited_s: float = 0.0,
        start_by: float | None = None,
    ) -> Request:
        """The engine's request for a prepared payload."""
        body = prepared.body
        return Request(
            id=job_id,
            execution=execution,
            prompt=prepared.prompt,
            params=prepared.params,
            max_tokens=prepared.max_tokens,
            generated=tuple(generated),
            stop=body.stop_strings,
            timeout_s=body.timeout_s or self._settings.timeout_s,
            cache_prompt=self._settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
            stream=body.stream,
            waited_s=waited_s,
            start_by=start_by,
        )

    def answer(self, question: Question) -> dict[str, Any]:
        """Answer a question of the web side; a refusal comes back as `{"error": …}`."""
        try:
            if question.kind == "check":
                return {"prompt_tokens": len(self.prepare(question.body["request"]).prompt)}
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

    def _prompt(self, body: GenerationRequest) -> list[int]:
        if body.messages is not None:
            if self.template is None:
                raise ChatTemplateError(
                    "the model has no chat template; start its worker with --chat-template, or give `prompt`",
                    "messages",
                )
            return self.template.tokens([m.model_dump() for m in body.messages])
        if isinstance(body.prompt, str):
            tokens = self._vocab.tokenize(body.prompt, parse_special=True)
            if not tokens:
                raise InvalidRequest("`prompt` has no tokens", "prompt")
            return with_bos(self._vocab, tokens)
        assert body.prompt is not None
        self._check_ids(body.prompt, "prompt")
        return list(body.prompt)

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
            return min(self._settings.max_tokens, room, cap or room)
        if body.max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens and `max_tokens` is {body.max_tokens}; "
                f"together a request may use {limit}",
                "max_tokens",
            )
        return body.max_tokens

    def _params(self, body: GenerationRequest, seed_source: str) -> SamplingParams:
        s = self._settings
        bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
        self._check_ids([token for token, _ in bias], "logit_bias")
        seed = _or(body.seed, s.seed)
        grammar = body.grammar or s.grammar or None
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
        )


def parse(payload: dict[str, Any]) -> GenerationRequest:
    """A payload as `GenerationRequest`.

    Raises:
        InvalidRequest: names the first bad field.
    """
    try:
        return GenerationRequest.model_validate(payload)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        raise InvalidRequest(f"{where or 'request'}: {first['msg'].removeprefix('Value error, ')}", where) from None


def _seed_of(source: str) -> int:
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4])


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
