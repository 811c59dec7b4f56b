"""Chat messages to prompt tokens, by the model's own Jinja template or the worker's file.

Sources: the environment that Hugging Face's `apply_chat_template` gives its templates (sandboxed, `trim_blocks`,
`lstrip_blocks`, `raise_exception`, `strftime_now`, `tojson`), which published templates are written for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ChatTemplateError
from worker.backend import Vocabulary


class ChatTemplate:
    """A compiled chat template. `tokens` may be called from any thread."""

    def __init__(self, source: str, vocab: Vocabulary) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._vocab = vocab
        self._bos = vocab.token_text(vocab.bos) if vocab.bos is not None else ""
        self._eos = vocab.token_text(min(vocab.eog)) if vocab.eog else ""
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template does not parse: {error}") from None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt as text, ready for the model to answer.

        Raises:
            ChatTemplateError: the template refused the messages; carries its message.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, bos_token=self._bos, eos_token=self._eos
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}", "messages") from None

    def tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The prompt as tokens. Control tokens come from the template alone, never from a message's content.

        Raises:
            ChatTemplateError: the template refused the messages, or changes their text so that it cannot be told
                apart from its own, while the text spells a control token.
        """
        text = self.render(messages)
        controls = self._vocab.control_texts()
        if not any(control in m["content"] for m in messages for control in controls):
            return with_bos(self._vocab, self._vocab.tokenize(text, parse_special=True))
        return with_bos(self._vocab, self._apart(messages, text))

    def _apart(self, messages: Sequence[dict[str, Any]], text: str) -> list[int]:
        marks = [f"\ue000{secrets.token_hex(8)}\ue001" for _ in messages]
        marked = self.render([{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
        whole = marked
        for mark, message in zip(marks, messages, strict=True):
            whole = whole.replace(mark, message["content"])
        if whole != text:
            raise ChatTemplateError(
                "a message spells a control token, and the chat template changes the text of messages", "messages"
            )
        tokens: list[int] = []
        while marked:
            at, mark = min(((marked.find(m), m) for m in marks if m in marked), default=(len(marked), ""))
            tokens += self._vocab.tokenize(marked[:at], parse_special=True) if at else []
            if mark:
                content = messages[marks.index(mark)]["content"]
                tokens += self._vocab.tokenize(content, parse_special=False)
            marked = marked[at + len(mark) :]
        return tokens


def with_bos(vocab: Vocabulary, tokens: list[int]) -> list[int]:
    """The tokens with exactly one start token where the model wants one, as they are where it does not."""
    if vocab.adds_bos and vocab.bos is not None and tokens[:1] != [vocab.bos]:
        return [vocab.bos, *tokens]
    return tokens


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
