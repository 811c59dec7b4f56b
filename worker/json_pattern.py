r"""The regular expressions of `pattern` and `patternProperties`: the part of ECMA-262 that can be enforced.

llguidance takes the dialect of Rust, so a pattern is read piece by piece and what means something else there is
rewritten or refused. One piece is a defect: in llguidance 1.9 a class that holds all control characters but not the
quotation mark, such as `[^"]`, lets the escape `\"` through, and the same with the backslash. Negated classes
therefore get `\x00`, which no answer can hold.
"""

from __future__ import annotations

import re

#: Repetitions in one place of a pattern.
MAX_REPEATS = 1_000

#: White space. *Source:* WhiteSpace and LineTerminator of ECMA-262; Rust's `\s` has U+0085 instead of U+FEFF.
_SPACE = r"\t\n\x0b\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"

_ESCAPE = re.compile(
    r"""\\(?:
        [dDwWsSnrtfv]
      | x(?!7f)[2-9a-fA-F][0-9a-fA-F]
      | u(?!00[01]|007f|[dD][89a-fA-F])[0-9a-fA-F]{4}
      | p\{(?:L|Lu|Ll|N|Nd)\}
      | [!-/:-@\[-`{-~]
    )""",
    re.VERBOSE,
)
_QUANTIFIER = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_GROUP = re.compile(r"\((?:\?:|\?<[A-Za-z_]\w*>|(?!\?))")
_REWRITTEN = {r"\s": f"[{_SPACE}]", r"\S": rf"[^\x00{_SPACE}]", r"\v": r"\x0b"}
_IN_CLASS = {r"\s": _SPACE, r"\v": r"\x0b"}
_CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class PatternError(ValueError):
    """The pattern is malformed, or holds what cannot be enforced."""


def read_pattern(pattern: str) -> str:
    """The pattern in the dialect of llguidance.

    Raises:
        PatternError: it holds what cannot be enforced. What is malformed otherwise shows when it is compiled.
    """
    if bad := _CONTROL.search(pattern):
        raise PatternError(f"holds the character {bad[0]!r}, which no answer can hold")
    pieces: list[str] = []
    place = 0
    while place < len(pattern):
        piece, place = _class(pattern, place) if pattern[place] == "[" else _piece(pattern, place)
        pieces.append(piece)
    return "".join(pieces)


def _piece(pattern: str, place: int) -> tuple[str, int]:
    """What stands at a place outside a class, rewritten, and where it ends."""
    match pattern[place]:
        case "\\":
            escape = _escape(pattern, place)
            return _REWRITTEN.get(escape, escape), place + len(escape)
        case ".":
            return r"[^\n\r\u2028\u2029]", place + 1
        case "(":
            group = _GROUP.match(pattern, place)
            if group is None:
                raise PatternError(f"has {pattern[place : place + 4]!r}: look-around and flags are not supported")
            return group[0].replace("?<", "?P<"), group.end()
        case "{":
            return _quantifier(pattern, place)
        case character:
            return character, place + 1


def _quantifier(pattern: str, place: int) -> tuple[str, int]:
    match = _QUANTIFIER.match(pattern, place)
    if match is None:
        raise PatternError(r"has a '{' that is no quantifier; write '\{'")
    if max(int(number) for number in match.groups() if number) > MAX_REPEATS:
        raise PatternError(f"repeats {match[0]} times; the limit is {MAX_REPEATS}")
    return match[0], match.end()


def _class(pattern: str, place: int) -> tuple[str, int]:
    """A class such as `[a-z]`, rewritten, and where it ends."""
    negated = pattern.startswith("[^", place)
    place += 2 if negated else 1
    pieces = [r"[^\x00" if negated else "["]
    if pattern.startswith("]", place):
        raise PatternError("has a class without characters")
    while not pattern.startswith("]", place):
        if place >= len(pattern):
            raise PatternError("has a class without an end")
        if pattern[place] == "\\":
            escape = _escape(pattern, place)
            pieces.append(_IN_CLASS.get(escape, escape))
            place += len(escape)
        else:
            if pattern[place] == "[" or pattern[place : place + 2] in ("&&", "--", "~~"):
                raise PatternError(f"has {pattern[place]!r} in a class; write '\\{pattern[place]}'")
            pieces.append(pattern[place])
            place += 1
    return "".join(pieces) + "]", place + 1


def _escape(pattern: str, place: int) -> str:
    match = _ESCAPE.match(pattern, place)
    if match is None:
        raise PatternError(f"has {pattern[place : place + 2]!r}, which is not supported")
    return match[0]
