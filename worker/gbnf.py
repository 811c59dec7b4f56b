"""Reads GBNF, the grammar language of llama.cpp, as far as is needed to judge a grammar before llama.cpp gets it.

llama.cpp's own parser writes its complaints to stderr, and some grammars that it accepts, or dies of, must never reach
it. *Source:* the format is described in grammars/README.md of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DEPTH = 64
MAX_REPETITIONS = 1000

#: Repetitions times the rules inside what they repeat. Source: MAX_REPETITION_THRESHOLD of llama.cpp.
MAX_REPEATED_RULES = 2000

_ESCAPE = r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])'
_CHARACTER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_LITERAL = re.compile(rf'"((?:{_ESCAPE}|[^"\\])*)"')
_CLASS = re.compile(rf"\[\^?+((?:{_ESCAPE}|[^\]\\])+)\]")
_TOKEN = re.compile(r"!?(<[^>]*>)")
_COUNTS = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}")


class GrammarSyntaxError(Exception):
    """The text is not GBNF, or nests or repeats too much."""


@dataclass(frozen=True, slots=True)
class Item:
    """One place of a sequence: a rule (or group) by name, or `size` characters, classes or tokens; repeated."""

    rule: str | None
    size: int
    least: int = 1
    most: int | None = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """A grammar: for each rule its alternatives, and the tokens it names, such as `<|im_end|>` or `<[7]>`.

    Groups are rules whose names begin with `(`.
    """

    rules: dict[str, list[list[Item]]]
    tokens: list[str]


def parse(text: str) -> Rules:
    """Read a grammar.

    Raises:
        GrammarSyntaxError: says what is wrong and in which line.
    """
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._depth = 0
        self._rules: dict[str, list[list[Item]]] = {}
        self._tokens: list[str] = []
        # llama.cpp counts a rule where its name first occurs, and one for each group and optional repetition.
        self._names: set[str] = set()
        self._made_rules = 0
        self._rules_inside = 1

    def parse(self) -> Rules:
        self._skip(_SPACE_AND_LINES)
        while self._pos < len(self._text):
            self._rule()
        if not self._rules:
            raise GrammarSyntaxError("there are no rules")
        return Rules(self._rules, self._tokens)

    def _rule(self) -> None:
        name = self._expect(_NAME, "the name of a rule (letters, digits and -)")[0]
        if name in self._rules:
            raise self._error(f"the rule {name!r} is defined twice")
        self._names.add(name)
        self._skip(_SPACE)
        self._expect(re.compile("::="), "::=")
        self._skip(_SPACE_AND_LINES)
        self._rules[name] = []
        self._rules[name] += self._alternatives(_SPACE)
        if self._pos < len(self._text) and self._text[self._pos] not in "\r\n":
            raise self._error("expected the end of the line")
        self._skip(_SPACE_AND_LINES)

    def _alternatives(self, space: re.Pattern[str]) -> Iterator[list[Item]]:
        yield self._sequence(space)
        while self._take("|"):
            self._skip(_SPACE_AND_LINES)
            yield self._sequence(space)

    def _sequence(self, space: re.Pattern[str]) -> list[Item]:
        items: list[Item] = []
        while (item := self._item()) is not None:
            self._skip(space)
            if (counts := self._repetition()) is not None:
                item = self._repeated(item, *counts)
                self._skip(space)
                if self._repetition() is not None:
                    raise self._error("there are two repetitions in a row; put the first in parentheses")
            items.append(item)
        return items

    def _item(self) -> Item | None:
        self._rules_inside = 1
        if match := self._match(_LITERAL):
            return Item(None, _length(match[1]))
        if match := self._match(_CLASS):
            return Item(None, _length(match[1]))
        if match := self._match(_TOKEN):
            self._tokens.append(match[1])
            return Item(None, 1)
        if match := self._match(_NAME):
            self._names.add(match[0])
            return Item(match[0], 1)
        if self._take("("):
            return self._group()
        if self._take("."):
            return Item(None, 1)
        if self._text[self._pos : self._pos + 1] in ('"', "[", "<", "!"):
            raise self._error("this is empty, does not end or has an unknown escape")
        return None

    def _group(self) -> Item:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        self._skip(_SPACE_AND_LINES)
        before = len(self._names) + self._made_rules
        self._made_rules += 1
        name = self._new_name()
        self._rules[name] += self._alternatives(_SPACE_AND_LINES)
        if not self._take(")"):
            raise self._error("expected )")
        self._depth -= 1
        self._rules_inside = len(self._names) + self._made_rules - before
        return Item(name, 1)

    def _repetition(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if not self._text.startswith("{", self._pos):
            return None
        match = self._expect(_COUNTS, "a repetition such as {2}, {2,} or {2,5}")
        least = int(match[1])
        most = int(match[3]) if match[3] else None if match[2] else least
        if max(least, most or 0) > MAX_REPETITIONS:
            raise self._error(f"{match[0]} repeats more than {MAX_REPETITIONS} times")
        if most is not None and most < max(least, 1):
            raise self._error(f"{match[0]} allows no repetition")
        return least, most

    def _repeated(self, item: Item, least: int, most: int | None) -> Item:
        if item.size == 0:
            raise self._error('"" cannot be repeated')
        self._rules_inside *= most or least or 1
        if self._rules_inside >= MAX_REPEATED_RULES:
            raise self._error("the repetition is too long for what it repeats; shorten one of them")
        self._made_rules += 1 if most is None else most - least
        return Item(item.rule, item.size, least, most)

    def _new_name(self) -> str:
        name = f"({len(self._rules)}"
        self._rules[name] = []
        return name

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._pos)
        if match is not None:
            self._pos = match.end()
        return match

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._match(pattern)

    def _take(self, sign: str) -> bool:
        if not self._text.startswith(sign, self._pos):
            return False
        self._pos += len(sign)
        return True

    def _expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = self._match(pattern)
        if match is None:
            raise self._error(f"expected {what}")
        return match

    def _error(self, message: str) -> GrammarSyntaxError:
        line = self._text.count("\n", 0, self._pos) + 1
        rest = self._text[self._pos : self._pos + 20].split("\n")[0]
        return GrammarSyntaxError(
            f"line {line}: {message}" + (f", at {rest!r}" if rest else ", at the end of the line")
        )


def _length(characters: str) -> int:
    return sum(1 for _ in _CHARACTER.finditer(characters))
