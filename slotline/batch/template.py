"""`--template`: a prompt with the columns of a line in it."""

from __future__ import annotations

import json
from string import Formatter
from typing import Any

from slotline.batch.problems import BadLine


class BadTemplate(ValueError):
    """The template cannot be read."""


class Template:
    """Text with `{column}` in it; literal braces are doubled.

    A column that is null becomes nothing, text stays as it is, and whatever else is written as JSON.

    Raises:
        BadTemplate: a brace is alone, or holds more than the name of a column.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._parts: list[tuple[str, str | None]] = []
        try:
            for literal, name, spec, conversion in Formatter().parse(text):
                if name is not None and (not name or spec or conversion):
                    raise BadTemplate(f"--template: write a column as {{name}}, not {{{name}…}} with more in it")
                self._parts.append((literal, name))
        except ValueError as error:
            if isinstance(error, BadTemplate):
                raise
            raise BadTemplate(f"--template: {error}; write a literal brace twice, as {{{{ or }}}}") from None

    def fill(self, fields: dict[str, Any]) -> str:
        """The text for one line.

        Raises:
            BadLine: the line lacks a column.
        """
        written = []
        for literal, name in self._parts:
            written.append(literal)
            if name is not None:
                written.append(_written(fields, name))
        return "".join(written)


def _written(fields: dict[str, Any], name: str) -> str:
    if name not in fields:
        there = ", ".join(map(repr, list(fields)[:20])) or "none"
        raise BadLine(f"has no column {name!r}, which --template names; its columns are {there}")
    value = fields[name]
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
