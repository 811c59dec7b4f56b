"""Grammars: what we let through to llama.cpp, and how it is compiled.

llama.cpp has no limits that a server needs. A repetition such as `{5,2}` or a rule that calls itself before it reads
a character take all memory while the grammar compiles, and many ways to begin multiply without end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import InvalidGrammar
from worker.gbnf import GrammarSyntaxError, Item, Rules, parse
from worker.llama_native import collected_log, first_error, slow

if TYPE_CHECKING:
    from worker.llama_vocab import LlamaVocab

MAX_BYTES = 64 * 1024

#: Characters, classes and rule names after llama.cpp has written every repetition out.
MAX_ELEMENTS = 50_000

#: Ways in which a rule can begin. llama.cpp follows all of them at once, at about 10 ns for each and each token.
MAX_BEGINNINGS = 1024

#: Bounded repetitions of something that can be empty: n characters split in as many ways as n to this power.
MAX_EMPTY_COPIES = 4

_init_grammar = slow("llama_sampler_init_grammar")


class Compiled(NamedTuple):
    """A grammar sampler of llama.cpp, to be freed by its owner, and the tokens that the grammar names."""

    sampler: Any
    named: frozenset[int]


def compile_grammar(vocab: LlamaVocab, grammar: str, root: str) -> Compiled:
    """Compile a grammar.

    Raises:
        InvalidGrammar: it does not parse or is beyond our limits.
    """
    named = frozenset(_token(vocab, text) for text in check(grammar, root).tokens)
    with collected_log() as lines:
        sampler = _init_grammar(vocab.handle, grammar.encode(), root.encode())
    if not sampler:
        raise InvalidGrammar(f"the grammar does not compile: {first_error(lines)}", "grammar")
    return Compiled(sampler, named)


def check(grammar: str, root: str) -> Rules:
    """The rules of a grammar that is within our limits.

    Raises:
        InvalidGrammar: it is not, or does not parse.
    """
    size = len(grammar.encode(errors="replace"))
    if size > MAX_BYTES:
        raise InvalidGrammar(f"the grammar has {size} bytes; the limit is {MAX_BYTES}", "grammar")
    if "\0" in grammar or not grammar.isascii() and grammar != grammar.encode(errors="ignore").decode():
        raise InvalidGrammar("the grammar holds a zero character or half of a surrogate pair", "grammar")
    try:
        rules = parse(grammar)
        _check_names(rules)
        _check_size(rules)
        _check_repetitions(rules, empty := _can_be_empty(rules))
        _check_beginnings(rules, empty)
    except GrammarSyntaxError as error:
        raise InvalidGrammar(f"the grammar is not valid: {error}", "grammar") from None
    if root.startswith("(") or root not in rules.rules:
        raise InvalidGrammar(f"the grammar has no rule {root!r} to begin with", "grammar_root")
    return rules


def _token(vocab: LlamaVocab, text: str) -> int:
    """The token that a grammar names by its text, or as in `<[7]>` by its number."""
    if match := re.fullmatch(r"<\[(\d{1,9})\]>", text):
        tokens = [int(match[1])]
    else:
        tokens = vocab.tokenize(text, parse_special=True)
    if len(tokens) != 1 or tokens[0] >= vocab.n_tokens:
        raise InvalidGrammar(f"the grammar names {text!r}, which is not a token of the model", "grammar")
    return tokens[0]


def _items(rules: Rules) -> list[Item]:
    return [item for alternatives in rules.rules.values() for sequence in alternatives for item in sequence]


def _check_names(rules: Rules) -> None:
    missing = next((i.rule for i in _items(rules) if i.rule is not None and i.rule not in rules.rules), None)
    if missing is not None:
        raise GrammarSyntaxError(f"the rule {missing!r} is used but not defined")


def _check_size(rules: Rules) -> None:
    """Source: llama.cpp writes S{m,n} as m copies of S and n - m rules, each of S, the next rule and an alternative."""
    elements = sum(i.size * i.least + (i.size + 2) * ((i.most or i.least + 1) - i.least) for i in _items(rules))
    if elements > MAX_ELEMENTS:
        raise GrammarSyntaxError(f"it grows to {elements} elements with its repetitions; the limit is {MAX_ELEMENTS}")


def _check_repetitions(rules: Rules, empty: set[str]) -> None:
    for item in _items(rules):
        if item.rule not in empty:
            continue
        if item.most is not None and item.most > MAX_EMPTY_COPIES:
            raise GrammarSyntaxError(f"what can be empty may not be repeated more than {MAX_EMPTY_COPIES} times")
        # llama.cpp takes this for left recursion.
        if item.most is None and any(all(i.size == 0 for i in s) for s in rules.rules[item.rule]):
            raise GrammarSyntaxError("what can be empty may not be repeated without end")


def _check_beginnings(rules: Rules, empty: set[str]) -> None:
    """Refuse left recursion, which never ends, and too many ways to begin."""
    first = {name: [i for s in alternatives for i in _first(s, empty)] for name, alternatives in rules.rules.items()}
    graph = {name: {i.rule for i in items if i.rule is not None} for name, items in first.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        names = [name for name in error.args[1] if not name.startswith("(")]
        raise GrammarSyntaxError(f"the rule {names[0]!r} can call itself before it reads a character") from None
    ways: dict[str, int] = {}
    for name in order:
        ways[name] = 1 + sum(_ways(item, ways, empty) for item in first[name])
        if ways[name] > MAX_BEGINNINGS:
            raise GrammarSyntaxError(f"a rule can begin in more than {MAX_BEGINNINGS} ways")


def _first(sequence: list[Item], empty: set[str]) -> list[Item]:
    """The items at which a sequence can begin."""
    for place, item in enumerate(sequence):
        if not _is_optional(item, empty):
            return sequence[: place + 1]
    return sequence


def _ways(item: Item, ways: dict[str, int], empty: set[str]) -> int:
    if item.rule is None:
        return 1
    copies = (item.most or item.least + 1) if item.rule in empty else 1
    return copies * (1 + ways[item.rule])


def _is_optional(item: Item, empty: set[str]) -> bool:
    return item.least == 0 or item.size == 0 or item.rule in empty


def _can_be_empty(rules: Rules) -> set[str]:
    """The rules that can match nothing at all."""
    users: dict[str, set[str]] = defaultdict(set)
    for name, alternatives in rules.rules.items():
        for sequence in alternatives:
            for item in sequence:
                if item.rule is not None:
                    users[item.rule].add(name)
    empty: set[str] = set()
    waiting = list(rules.rules)
    while waiting:
        name = waiting.pop()
        if name not in empty and any(all(_is_optional(i, empty) for i in s) for s in rules.rules[name]):
            empty.add(name)
            waiting += users[name]
    return empty
