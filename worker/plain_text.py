"""Tokens of a rendered chat in which control tokens come from the template alone.

What users give is tokenised as plain text. Where it spells a control token, those spots are marked and rendered, and
what stands around them is tokenised apart from the template's control tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from shared.errors import ChatTemplateError
from worker.backend import Vocabulary

Variables = dict[str, Any]

#: In the place of a character with which a control token begins or ends; from Unicode's private use area.
_BLANK = "\ue000"


class PlainText:
    """Tokenises what a template makes of user text, for one vocabulary."""

    def __init__(self, vocab: Vocabulary) -> None:
        texts = sorted(filter(None, vocab.control_texts()), key=len, reverse=True)
        # Not letters: templates look at words, such as roles.
        edges = {edge for text in texts for edge in (text[0], text[-1]) if not edge.isalnum()}
        self._vocab = vocab
        self._texts = texts
        self._spelt = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._edge = re.compile("[" + "".join(map(re.escape, sorted(edges))) + "]" if edges else "(?!)")

    def render(self, variables: Variables, render: Callable[[Variables], str]) -> tuple[str, list[int]]:
        """Render the variables; returns the text and its tokens, with exactly one start token where one is wanted.

        Control tokens are counted in what is rendered, and again with every character blanked that user text could
        begin or end one with. Equal counts mean that none is the users'.

        Raises:
            ChatTemplateError: user text spells a control token, and the template changes it so that it cannot be
                told apart from the template's own.
        """
        text = render(variables)
        return text, with_bos(self._vocab, self._tokens(text, variables, render))

    def _tokens(self, text: str, variables: Variables, render: Callable[[Variables], str]) -> list[int]:
        if not any(self._edge.search(given) for given in _texts_of(variables)):
            return self._vocab.tokenize(text, parse_special=True)
        own = self._count(_rendered(changed(variables, self._blanked), render))
        if self._count(text) == own:
            return self._vocab.tokenize(text, parse_special=True)
        marks: dict[str, str] = {}
        marked = _rendered(changed(variables, lambda given: self._marked(given, marks)), render)
        restored = _splitter(marks).sub(lambda found: marks[found[0]], marked)
        if restored != text or self._count(marked) != own:
            raise _inseparable()
        return self._apart(marked, marks)

    def _count(self, text: str) -> dict[str, int]:
        return {control: count for control in self._texts if (count := text.count(control))}

    def _blanked(self, given: str) -> str:
        return self._edge.sub(_BLANK, given)

    def _marked(self, given: str, marks: dict[str, str]) -> str:
        """The text with a mark for each control token in it: digits, which survive what templates do to text."""

        def mark(found: re.Match[str]) -> str:
            made = next((m for m, control in marks.items() if control == found[0]), None)
            made = made or f"{secrets.randbelow(10**24):024}"
            marks[made] = found[0]
            return made

        return self._spelt.sub(mark, given)

    def _apart(self, marked: str, marks: dict[str, str]) -> list[int]:
        """Tokens of marked text. What stands between two control tokens and holds a mark is tokenised as plain text."""
        tokens: list[int] = []
        own = ""
        find = _splitter(marks)
        for stretch in re.split(f"({self._spelt.pattern})", marked):
            plain, found = find.subn(lambda mark: marks[mark[0]], stretch)
            if not found:
                own += stretch
                continue
            tokens += self._tokenized(own, parse_special=True) + self._tokenized(plain, parse_special=False)
            own = ""
        return tokens + self._tokenized(own, parse_special=True)

    def _tokenized(self, text: str, *, parse_special: bool) -> list[int]:
        return self._vocab.tokenize(text, parse_special=parse_special) if text else []


def with_bos(vocab: Vocabulary, tokens: list[int]) -> list[int]:
    """The tokens with exactly one start token where the model wants one, as they are where it does not."""
    if vocab.adds_bos and vocab.bos is not None and tokens[:1] != [vocab.bos]:
        return [vocab.bos, *tokens]
    return tokens


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [changed(inner, change) for inner in value]
    return value


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_of(inner)


def _splitter(marks: dict[str, str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(marks)})" if marks else "((?!))")


def _rendered(variables: Variables, render: Callable[[Variables], str]) -> str:
    try:
        return render(variables)
    except ChatTemplateError:
        raise _inseparable() from None


def _inseparable() -> ChatTemplateError:
    return ChatTemplateError(
        "a message spells a control token, and the chat template changes the text of messages", "messages"
    )
