"""Whether two JSON schemas exclude each other, so that `oneOf` and `anyOf` mean the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
#: The schema that a reference means.
Resolve = Callable[[str], Schema | bool]

#: References and alternatives within each other that are followed.
_MAX_DEPTH = 8
#: Pairs that are compared for one schema, at 10 µs each; enough for some 150 alternatives.
_MAX_PAIRS = 50_000

_SPLIT = {"number": {"integer", "fraction"}, "integer": {"integer"}}
_TYPES = {"null", "boolean", "string", "array", "object", "integer", "fraction"}


class Comparison:
    """Compares the schemas within one schema."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._pairs = 0

    def are_disjoint(self, one: Schema | bool, two: Schema | bool, depth: int = 0) -> bool:
        """Whether no value fulfils both, as far as types, constants and required properties tell."""
        self._pairs += 1
        if isinstance(one, bool) or isinstance(two, bool):
            return one is False or two is False
        if depth > _MAX_DEPTH or self._pairs > _MAX_PAIRS:
            return False
        if _differ(one, two) or self._objects_differ(one, two, depth):
            return True
        return any(self._parts_differ(this, that, depth) for this, that in ((one, two), (two, one)))

    def _parts_differ(self, this: Schema, that: Schema, depth: int) -> bool:
        """Whether one of the schemas that `this` consists of, or all its alternatives, exclude `that`."""
        for options in (this[key] for key in ("anyOf", "oneOf") if key in this):
            if all(self.are_disjoint(option, that, depth + 1) for option in options):
                return True
        parts = [*this.get("allOf", ()), *([self._resolve(this["$ref"])] if "$ref" in this else ())]
        return any(self.are_disjoint(part, that, depth + 1) for part in parts)

    def _objects_differ(self, one: Schema, two: Schema, depth: int) -> bool:
        """Whether both are objects only, and one requires a property that cannot be as both want it."""
        if _types(one) & _types(two) != {"object"}:
            return False
        names = {*one.get("required", ()), *two.get("required", ())}
        return any(self.are_disjoint(_property(one, n), _property(two, n), depth + 1) for n in names)


def _differ(one: Schema, two: Schema) -> bool:
    """Whether types or constants have nothing in common."""
    values = _values(one), _values(two)
    if values[0] is not None and values[1] is not None and not values[0] & values[1]:
        return True
    return not _types(one) & _types(two)


def _property(schema: Schema, name: str) -> Schema | bool:
    rest = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    found: Schema | bool = schema.get("properties", {}).get(name, rest)
    return found


def _values(schema: Schema) -> set[str] | None:
    """The constants that a schema allows, as text that is the same for equal values; None for any."""
    if "const" in schema:
        return {_text(schema["const"])}
    return set(map(_text, schema["enum"])) if "enum" in schema else None


def _text(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """The value with 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _types(schema: Schema) -> set[str]:
    """The types that a schema allows; a number is an integer or a fraction."""
    given = schema.get("type", list(_TYPES))
    return set().union(*(_SPLIT.get(name, {name}) for name in ([given] if isinstance(given, str) else given)))
