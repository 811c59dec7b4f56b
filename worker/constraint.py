"""Constraints: what an answer has to be, as the text of a grammar for llguidance.

An answer is put together from parts (`Literal`, `Control`, `Json`, ...), and `render` writes them as one grammar. The
text is what a request carries (`SamplingParams.constraint`); `worker/matcher.py` compiles and follows it.
*Source:* docs/syntax.md of llguidance for the grammar's language.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.errors import UnsupportedSchema
from worker.backend import Vocabulary
from worker.json_fault import find_fault
from worker.json_schema import Schema, read_schema
from worker.matcher import compile_error

#: JSON is written on one line, with at most one space, behind `:` and `,`: a small model that may write blanks goes on
#: with them to the last token. In strings only characters that JSON cannot hold otherwise are escaped. A key such as
#: `"\u0061"` would be a second way to write `"a"`, past the schema of that property.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Control:
    """One token by its number: a control token, whose text is never part of an answer."""

    token: int


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value of a schema that was read (`json_schema`)."""

    schema: Schema


@dataclass(frozen=True, slots=True)
class Blanks:
    """Up to eight blanks or line ends."""


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text, also none, without control tokens."""


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to and including the first `mark`."""

    mark: Literal | Control


@dataclass(frozen=True, slots=True)
class Chain:
    """One part after the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the parts."""

    options: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Many:
    """The part any number of times, also none."""

    part: Part


Part = Literal | Control | Json | Blanks | AnyText | Until | Chain | Choice | Many


def json_schema(schema: Any, param: str) -> Json:
    """A JSON value that a schema allows.

    Args:
        param: where the schema stands in the request, for errors.

    Raises:
        UnsupportedSchema: the schema is malformed, beyond our limits, or holds what cannot be enforced.
    """
    read = Json(read_schema(schema, param))
    if error := compile_error(render(read)):
        place, reason = find_fault(read.schema, error)
        path = ".".join((param, *place))
        raise UnsupportedSchema(f"{path}: {reason}", path)
    return read


def json_schema_constraint(schema: Any, param: str) -> str:
    """The constraint of an answer that is a JSON value of a schema; see `json_schema`."""
    return render(json_schema(schema, param))


def json_object_constraint() -> str:
    """The constraint of an answer that is any JSON object."""
    return json_schema_constraint({"type": "object"}, "response_format")


def mark(vocab: Vocabulary, text: str) -> Literal | Control:
    """A mark such as `<tool_call>`: the control token of that text, or where the vocabulary has none the text."""
    if text in vocab.control_texts():
        (token,) = vocab.tokenize(text, parse_special=True)
        return Control(token)
    return Literal(text)


def tool_calls(calls: Sequence[Part], *, between: Part | None = None) -> Part:
    """One of the calls; with `between` any number of them, at least one, and that in between."""
    one = Choice(tuple(calls))
    return one if between is None else Chain((one, Many(Chain((between, one)))))


def text_or_tool_calls(opening: Literal | Control, calls: Sequence[Part]) -> Part:
    """Free text, in which one of the calls has to follow each `opening`; the calls do not repeat it."""
    return Chain((Many(Chain((Until(opening), Choice(tuple(calls))))), AnyText()))


def after_reasoning(closing: Literal | Control, part: Part) -> Part:
    """Any text up to and including `closing`, blanks, and then the part."""
    return Chain((Until(closing), Blanks(), part))


def render(part: Part) -> str:
    """The grammar's text."""
    writer = _Writer()
    start = writer.write(part)
    # The parser would otherwise choose how forced text is split into tokens; here the model does.
    head = '%llguidance {"no_forcing": true}\n'
    return head + "\n".join([f"start: {start}", *writer.rules]) + "\n"


@dataclass(slots=True)
class _Writer:
    """Writes parts; what needs a rule of its own becomes one, and the same thing only once."""

    names: dict[str, str] = field(default_factory=dict)

    @property
    def rules(self) -> list[str]:
        return [name + body for body, name in self.names.items()]

    def write(self, part: Part) -> str:
        match part:
            case Literal(text):
                return json.dumps(text, ensure_ascii=False)
            case Control(token):
                return f"<[{token}]>"
            case Json(schema):
                return self._rule("%json " + _schema_text(schema))
            case Blanks():
                return self._rule(r"/[ \t\n\r]{0,8}/")
            case AnyText():
                return self._rule("/(?s:.*)/")
            case Until(closing):
                # A control token ends a text by itself. A text that closes is the first such text.
                if isinstance(closing, Control):
                    return f"{self.write(AnyText())} {self.write(closing)}"
                return self._rule(f"/(?s:.*)/ {self.write(closing)}", "[lazy]")
            case Chain(parts):
                return "(" + " ".join(map(self.write, parts)) + ")"
            case Choice(options):
                return "(" + " | ".join(map(self.write, options)) + ")"
            case Many(inner):
                return f"({self.write(inner)})*"

    def _rule(self, body: str, options: str = "") -> str:
        return self.names.setdefault(f"{options}: {body}", f"r{len(self.names)}")


def _schema_text(schema: Schema) -> str:
    # Last, because llguidance puts the last keyword in its place, and their order is that of the properties.
    return json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
