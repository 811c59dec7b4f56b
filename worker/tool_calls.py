"""Reading tool calls while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from worker.tools import OWN_ID, ToolSyntax


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call: its name, which begins it, or some of the JSON text of its arguments."""

    name: str | None = None
    arguments: str = ""


class JsonScanner:
    """Finds the end of a JSON object that comes in pieces. It looks at brackets and strings only."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """The place in `text`, the next piece, behind the object; None where it goes on."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


_OBJECT = r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_LEADS = {"marked": r"\s*", "bare": r"\s*", "list": r"\s*\[\s*"}
_NEXT_LEAD = r"\s*,\s*"
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Longer than any head that is read before its call is complete. Each token has it looked at anew, so that a name
#: or blanks without end would take ever longer.
_HEAD = 256


class CallReader:
    """Reads the calls behind one `begin`, as text comes in.

    Attributes:
        over: whether no call can follow; `rest` is then text that belongs to no call.
        rest: text that is not part of a call, as far as is known now.
        started: whether a call has been found.
    """

    def __init__(self, syntax: ToolSyntax, functions: Collection[str]) -> None:
        self.over = False
        self.rest = ""
        self.started = False
        self._syntax = syntax
        self._functions = functions
        self._scanner = JsonScanner()
        self._scanned = 0
        self._step = self._head
        self._pieces: list[CallPiece] = []

    def push(self, text: str) -> list[CallPiece]:
        """Take the next text and return what it adds to the calls."""
        self.rest += text
        while not self.over and self._step():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """The answer has ended. What is not known to be a call by now is none; an unfinished call stays so."""
        if self._step != self._head:
            self.rest = ""
        self.over = True

    def _end(self) -> bool:
        self.over = True
        return False

    def _head(self) -> bool:
        if self._syntax.form == "named":
            return self._named_head()
        lead = _NEXT_LEAD if self.started else _LEADS[self._syntax.form]
        head = self.rest[:_HEAD]
        if match := re.match(lead + _OBJECT, head):
            return self._begin(_string(match["name"]), match.end())
        opened = re.match(lead + "(?P<rest>.?)", head, re.DOTALL)
        if opened is not None and opened["rest"]:
            return self._whole_object(opened.start("rest"))
        no_call = opened is None and head.strip()
        return self._end() if no_call or len(head) == _HEAD else False

    def _named_head(self) -> bool:
        own_id, separator = re.escape(OWN_ID), re.escape(self._syntax.separator)
        head = rf"\s{{0,8}}(?P<name>{_NAME.pattern})(?:{own_id}\w{{0,64}})?{separator}\s{{0,8}}(?=\{{)"
        if match := re.match(head, self.rest):
            return self._begin(match["name"], match.end())
        return self._end() if len(self.rest) >= _HEAD else False

    def _whole_object(self, start: int) -> bool:
        """A call whose keys come in another order is read once it is complete."""
        first = _FIRST_KEY.match(self.rest[start : start + _HEAD])
        foreign = first is not None and first[1] not in _CALL_KEYS
        if self.rest[start] != "{" or foreign:
            return self._end()
        at = max(start, self._scanned)
        end = self._scanner.end(self.rest[at:])
        self._scanned = len(self.rest)
        if end is None:
            return False
        call = _call_of(self.rest[start : at + end])
        if call is None or not self._knows(call[0]):
            return self._end()
        self._pieces += [CallPiece(name=call[0]), CallPiece(arguments=call[1])]
        self.rest, self.started, self._step = self.rest[at + end :], True, self._after
        return True

    def _begin(self, name: str | None, end: int) -> bool:
        if name is None or not self._knows(name):
            return self._end()
        self._pieces.append(CallPiece(name=name))
        self.rest, self.started = self.rest[end:], True
        self._scanner, self._step = JsonScanner(), self._arguments
        return True

    def _arguments(self) -> bool:
        end = self._scanner.end(self.rest)
        if self.rest:
            self._pieces.append(CallPiece(arguments=self.rest[:end]))
        self.rest = "" if end is None else self.rest[end:]
        if end is None:
            return False
        self._scanner = JsonScanner(depth=1)
        self._step = self._after if self._syntax.form == "named" else self._tail
        return True

    def _tail(self) -> bool:
        """Pass over other keys, up to the end of the call's object."""
        end = self._scanner.end(self.rest)
        self.rest = "" if end is None else self.rest[end:]
        self._step = self._tail if end is None else self._after
        return end is not None

    def _after(self) -> bool:
        following = self.rest.lstrip()
        if self._syntax.form == "list":
            return self._after_item(following)
        end = self._syntax.end
        if following.startswith(end):
            self.rest = following[len(end) :]
        elif end.startswith(following):
            return False
        return self._end()

    def _after_item(self, following: str) -> bool:
        if not following:
            return False
        if following[0] == ",":
            self._scanner, self._scanned, self._step = JsonScanner(), 0, self._head
            return True
        self.rest = following.removeprefix("]")
        return self._end()

    def _knows(self, name: str) -> bool:
        # Without a mark, only the name tells a call from an answer that happens to be such an object.
        return _NAME.fullmatch(name) is not None and (self._syntax.form != "bare" or name in self._functions)


def _string(text: str) -> str | None:
    found = _loads(text)
    return found if isinstance(found, str) else None


def _call_of(text: str) -> tuple[str, str] | None:
    """The name and the arguments' JSON text of a whole call; None where it is none."""
    call = _loads(text)
    if not isinstance(call, dict):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    try:
        return call["name"], json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _loads(text: str) -> Any:
    """The value of a JSON text; None where it is none, or nested beyond Python's limit."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
