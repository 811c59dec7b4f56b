"""JSON schemas: every keyword is one that is enforced, or the schema is refused.

Read as Draft 2020-12 whatever `$schema` says. Which keywords are enforced was found by trying pairs of documents
(`tests/worker/test_json_schema.py`); `docs/structured-output.md` has the table. *Source:* the specification of Draft
2020-12 and the manner of the public JSON-Schema-Test-Suite.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import quote, unquote

from shared.errors import UnsupportedSchema
from worker.json_disjoint import Comparison
from worker.json_pattern import PatternError, read_pattern

Schema = dict[str, Any]
Place = tuple[str, ...]

MAX_BYTES = 64 * 1024
#: Containers within containers; a property within a property takes two.
MAX_DEPTH = 100
#: For `minLength` and `maxLength`: a lexer has a few states for each character.
MAX_LENGTH = 10_000
#: For `minItems`, `maxItems`, `minProperties` and `maxProperties`: a grammar has a few symbols for each.
MAX_ITEMS = 1_000
#: Properties of one object that may be left out: each is a way to go on.
MAX_OPTIONAL = 400
#: The least number of which all `multipleOf` are factors, in units of their last digit: a lexer has as many states.
MAX_MULTIPLE = 100_000

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_ANNOTATIONS |= {"$schema", "$comment", "discriminator"}
#: Formats that llguidance enforces, and those for which its expression is too lax and ours is used.
_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
_MAX_HOSTNAME = 253

#: Keywords that hold a schema, a list of schemas, schemas by name.
_WITH_SCHEMA = {"items", "additionalProperties"}
_WITH_LIST = {"prefixItems", "allOf", "anyOf", "oneOf"}
_WITH_MAP = {"properties", "patternProperties", "$defs", "definitions"}
#: Keywords whose schemas are for the same value. They come last, so that an object's own properties come first.
_IN_PLACE = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")

#: JSON escapes only these of the characters that must be escaped by a name, and an answer uses no numbers.
_UNWRITABLE = re.compile("[\0-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
#: Beyond it not every integer is a number of its own for llguidance.
_MAX_INTEGER = 2**53


def read_schema(schema: Any, param: str) -> Schema:
    """The schema without annotations, every keyword of which llguidance enforces.

    Args:
        param: where it stands in the request, for errors.

    Raises:
        UnsupportedSchema: it is malformed, beyond our limits, or holds what cannot be enforced. Whether it can be
            fulfilled at all shows only when it is compiled.
    """
    reader = _Reader(param)
    reader.check_size(schema)
    result = reader.schema(schema, ())
    if result is False:
        raise reader.error((), "the schema allows nothing")
    reader.resolve()
    reader.replace_one_of()
    return result if isinstance(result, dict) else {}


def schema_places(schema: Schema | bool, place: Place = ()) -> Iterator[tuple[Place, Schema | bool]]:
    """A schema that was read and those in it, each with its place; those within come before what holds them."""
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            if keyword in _WITH_SCHEMA:
                yield from schema_places(value, (*place, keyword))
            elif keyword in _WITH_LIST:
                for i, part in enumerate(value):
                    yield from schema_places(part, (*place, keyword, str(i)))
            elif keyword in _WITH_MAP:
                for name, part in value.items():
                    yield from schema_places(part, (*place, keyword, name))
    yield place, schema


@dataclass(slots=True)
class _Reader:
    """Reads one schema. `places` become the schemas in it, `references` the places that a `$ref` means."""

    param: str
    places: dict[Place, Schema | bool] = field(default_factory=dict)
    references: dict[Place, Place] = field(default_factory=dict)
    multiples: list[Decimal] = field(default_factory=list)

    def error(self, place: Place, message: str) -> UnsupportedSchema:
        path = ".".join((self.param, *place))
        return UnsupportedSchema(f"{path}: {message}", path)

    def schema(self, value: Any, place: Place) -> Schema | bool:
        """The schema that stands at a place, without annotations."""
        if isinstance(value, dict):
            self._check_depth(place)
            read = {key: self._keyword(key, value[key], (*place, key)) for key in value if not _is_noted(key, place)}
            self._check_together(read, place)
            _apply_format(read)
            _bound_integer(read)
            value = {key: read[key] for key in sorted(read, key=_IN_PLACE.__contains__)}
        elif not isinstance(value, bool):
            raise self.error(place, "a schema is an object, true or false")
        self.places[place] = value
        return value  # type: ignore[no-any-return]

    def check_size(self, schema: Any) -> None:
        """Refuse a schema of too many bytes."""
        try:
            size = len(json.dumps(schema, ensure_ascii=False).encode(errors="surrogatepass"))
        except RecursionError:
            raise self.error((), f"the schema is nested more than {MAX_DEPTH} deep") from None
        if size > MAX_BYTES:
            raise self.error((), f"the schema has {size} bytes; the limit is {MAX_BYTES}")

    def resolve(self) -> None:
        """Refuse references that lead nowhere or in a circle."""
        for place, target in self.references.items():
            if target not in self.places:
                raise self.error((*place, "$ref"), f"{_pointer(target)!r} is no schema in this schema")
        graph = {place: self._same_value(place) for place in self.places}
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            place = next(place for place in error.args[1] if place in self.references)
            raise self.error((*place, "$ref"), "the schema refers to itself for the same value") from None

    def replace_one_of(self) -> None:
        """Write `anyOf` for each `oneOf` whose alternatives exclude each other; refuse the others."""
        comparison = Comparison(lambda reference: self.places[_place(reference)])
        for place, schema in self.places.items():
            if isinstance(schema, dict) and "oneOf" in schema:
                pairs = itertools.combinations(schema["oneOf"], 2)
                if not all(itertools.starmap(comparison.are_disjoint, pairs)):
                    raise self.error((*place, "oneOf"), "two alternatives may both be fulfilled; use anyOf")
        for schema in self.places.values():
            if isinstance(schema, dict) and "oneOf" in schema:
                schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": schema.pop("oneOf")}]

    def _same_value(self, place: Place) -> list[Place]:
        """The places of schemas that are for the same value."""
        schema, places = self.places[place], []
        if isinstance(schema, dict):
            for keyword in ("allOf", "anyOf", "oneOf"):
                places += [(*place, keyword, str(i)) for i in range(len(schema.get(keyword, ())))]
        return [p for p in (*places, self.references.get(place)) if p in self.places]

    def _keyword(self, keyword: str, value: Any, place: Place) -> Any:
        read = _KEYWORDS.get(keyword)
        if read is None:
            raise self.error(place, f"the keyword {keyword!r} is not enforced here")
        return read(self, value, place)

    def _check_depth(self, place: Place) -> None:
        if len(place) > MAX_DEPTH:
            raise self.error(place, f"the schema is nested more than {MAX_DEPTH} deep")

    def _check_together(self, schema: Schema, place: Place) -> None:
        """Check keywords of one schema that depend on each other."""
        for least, most in _BOUNDS:
            if least in schema and most in schema and schema[least] > schema[most]:
                raise self.error((*place, least), f"{least} {schema[least]} is more than {most} {schema[most]}")
        required = schema.get("required", ())
        if schema.get("minProperties", 0) > len(required) + 1:
            # An answer may repeat a key that is not in `properties`, which then counts once.
            raise self.error((*place, "minProperties"), "more than one above the number of `required` is not enforced")
        optional = len(schema.get("properties", {}).keys() - set(required))
        if optional > MAX_OPTIONAL:
            raise self.error((*place, "properties"), f"{optional} are not required; the limit is {MAX_OPTIONAL}")

    def read_type(self, value: Any, place: Place) -> Any:
        types = value if isinstance(value, list) else [value]
        if not types or any(name not in _TYPES for name in types) or len(set(types)) < len(types):
            raise self.error(place, f"is not one or several of {', '.join(_TYPES)}")
        return value

    def read_values(self, value: Any, place: Place) -> Any:
        if not isinstance(value, list) or not value:
            raise self.error(place, "is not a list of at least one value")
        return [self.read_value(item, (*place, str(i))) for i, item in enumerate(value)]

    def read_value(self, value: Any, place: Place) -> Any:
        """A value that an answer can be made to hold."""
        self._check_depth(place)
        if isinstance(value, dict):
            return {self._writable(key, place): self.read_value(item, (*place, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.read_value(item, (*place, str(i))) for i, item in enumerate(value)]
        if isinstance(value, str):
            return self._writable(value, place)
        return value if value is None or isinstance(value, bool) else self.read_number(value, place)

    def read_number(self, value: Any, place: Place) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MAX_INTEGER:
            raise self.error(place, "is not a number between -2^53 and 2^53")
        return value

    def read_multiple(self, value: Any, place: Place) -> Any:
        if self.read_number(value, place) <= 0:
            raise self.error(place, "is not more than 0")
        self.multiples.append(Decimal(str(value)))
        places = max(0, *(-int(number.normalize().as_tuple().exponent) for number in self.multiples))
        if places > 20 or math.lcm(*(int(number.scaleb(places)) for number in self.multiples)) > MAX_MULTIPLE:
            raise self.error(place, f"the factors of the schema have no common multiple up to {MAX_MULTIPLE}")
        return value

    def read_count(self, value: Any, place: Place) -> int:
        most = MAX_LENGTH if place[-1].endswith("Length") else MAX_ITEMS
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise self.error(place, "is not a whole number from 0")
        if number > most:
            raise self.error(place, f"{place[-1]} {number} is beyond the limit of {most}")
        return number

    def read_pattern(self, value: Any, place: Place) -> str:
        if not isinstance(value, str):
            raise self.error(place, "is not a regular expression")
        try:
            return read_pattern(value)
        except PatternError as error:
            raise self.error(place, f"the regular expression {error}") from None

    def read_format(self, value: Any, place: Place) -> Any:
        known = sorted(_FORMATS | _FORMAT_PATTERNS.keys())
        if value not in known:
            raise self.error(place, f"the format {value!r} is not enforced here; use {', '.join(known)}")
        return value

    def read_names(self, value: Any, place: Place) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(place, "is not a list of names")
        if len(set(value)) < len(value):
            raise self.error(place, "names a property twice")
        return [self._writable(name, place) for name in value]

    def read_schemas(self, value: Any, place: Place) -> Any:
        if not isinstance(value, list) or not value:
            raise self.error(place, "is not a list of at least one schema")
        return [self.schema(part, (*place, str(i))) for i, part in enumerate(value)]

    def read_items(self, value: Any, place: Place) -> Any:
        if isinstance(value, list):
            raise self.error(place, "is a list, which is `prefixItems` since Draft 2020-12")
        return self.schema(value, place)

    def read_properties(self, value: Any, place: Place) -> Any:
        if not isinstance(value, dict):
            raise self.error(place, "is not an object of schemas")
        return {self._writable(name, (*place, name)): self.schema(part, (*place, name)) for name, part in value.items()}

    def read_pattern_properties(self, value: Any, place: Place) -> Any:
        if not isinstance(value, dict):
            raise self.error(place, "is not an object of schemas")
        return {
            self.read_pattern(pattern, (*place, pattern)): self.schema(part, (*place, pattern))
            for pattern, part in value.items()
        }

    def read_reference(self, value: Any, place: Place) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise self.error(place, "is not a place in this schema, such as '#/$defs/name'")
        self.references[place[:-1]] = target = _place(value)
        return _pointer(target)

    def _writable(self, text: str, place: Place) -> str:
        if bad := _UNWRITABLE.search(text):
            raise self.error(place, f"holds the character {bad[0]!r}, which no answer can hold")
        return text


_BOUNDS = [(f"min{what}", f"max{what}") for what in ("Length", "Items", "Properties", "imum")]

_KEYWORDS: dict[str, Callable[[_Reader, Any, Place], Any]] = {
    "type": _Reader.read_type,
    "enum": _Reader.read_values,
    "const": _Reader.read_value,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Reader.read_number),
    "multipleOf": _Reader.read_multiple,
    **dict.fromkeys((bound for bounds in _BOUNDS[:3] for bound in bounds), _Reader.read_count),
    "pattern": _Reader.read_pattern,
    "format": _Reader.read_format,
    "items": _Reader.read_items,
    **dict.fromkeys(("prefixItems", "allOf", "anyOf", "oneOf"), _Reader.read_schemas),
    **dict.fromkeys(("properties", "$defs", "definitions"), _Reader.read_properties),
    "patternProperties": _Reader.read_pattern_properties,
    "additionalProperties": _Reader.schema,
    "required": _Reader.read_names,
    "$ref": _Reader.read_reference,
}


def _is_noted(keyword: str, place: Place) -> bool:
    """Whether a keyword allows and forbids nothing; within a schema `$id` would change what references mean."""
    return keyword in _ANNOTATIONS or (keyword == "$id" and not place)


def _apply_format(schema: Schema) -> None:
    """Write as other keywords what llguidance does not enforce of a format."""
    if schema.get("format") == "hostname":
        schema["maxLength"] = min(schema.get("maxLength", MAX_LENGTH), _MAX_HOSTNAME)
    elif pattern := _FORMAT_PATTERNS.get(schema.get("format", "")):
        del schema["format"]
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern


def _bound_integer(schema: Schema) -> None:
    """Keep integers to 15 digits, which every program reads alike; without bounds small models write them for ever.

    *Source:* section 2.2 of RFC 7493 (I-JSON), whose bounds are a little wider and take longer to compile.
    """
    if schema.get("type") == "integer" or ("integer" in schema.get("type", ()) and "number" not in schema["type"]):
        if not {"minimum", "exclusiveMinimum"} & schema.keys():
            schema["minimum"] = 1 - 10**15
        if not {"maximum", "exclusiveMaximum"} & schema.keys():
            schema["maximum"] = 10**15 - 1


def _place(reference: str) -> Place:
    """The place that a reference such as `#/$defs/a~1b` means. *Source:* RFC 6901."""
    parts = unquote(reference.removeprefix("#").removeprefix("/")).split("/")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts) if parts != [""] else ()


def _pointer(place: Place) -> str:
    return "#" + "".join("/" + quote(part.replace("~", "~0").replace("/", "~1"), safe="~$") for part in place)
