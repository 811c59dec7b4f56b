"""Which keywords of JSON schema are enforced, by pairs of documents in the manner of the JSON-Schema-Test-Suite."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from shared.errors import GrammarDeadEnd, UnsupportedSchema
from worker.constraint import json_schema_constraint
from worker.fake_scripts import SPOKEN, FakeVocab
from worker.json_schema import MAX_BYTES, MAX_DEPTH, MAX_ITEMS, MAX_LENGTH, MAX_OPTIONAL

VOCAB = FakeVocab()
INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
ONLY_A: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "required": ["a"]}


def accepts(schema: Any, text: str) -> bool:
    """Whether an answer under the schema can be this text."""
    matcher = VOCAB.constraints.matcher(json_schema_constraint(schema, "schema"))
    try:
        for byte in text.encode():
            matcher.accept(SPOKEN + byte)
    except GrammarDeadEnd:
        return False
    return matcher.is_accepting


def kind(name: str, **properties: Any) -> dict[str, Any]:
    """An object with a constant, as the members of a discriminated union have."""
    properties = {"kind": {"const": name}, **properties}
    return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}


# schema, values that must be accepted, values that must be refused
VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [1, "a", None, {}, []], []),
    ({}, [1, "a", None, {}, [[{"a": 1}]]], []),
    # type
    (INTEGER, [0, -1, 10**15 - 1, 1 - 10**15], [1.5, "1", True, None, [], {}, 10**15, 10**30]),
    ({"type": ["integer", "string"], "minimum": -5}, [-5, 10**15 - 1, "a"], [-6, 10**15]),
    ({"type": "number"}, [0, -1.5, 1e300, 2.5e-7], ["1", True]),
    (STRING, ["", "é😀", 'a\nb\t"\\/', "\b\f\r", "nul"], [1, None]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
    (NULL, [None], [0, False, ""]),
    ({"type": "array"}, [[], [1, [2]]], [{}, "[]"]),
    ({"type": "object"}, [{}, {"a": [1, {"b": None}]}], [[], 1]),
    ({"type": ["integer", "null", "array"]}, [1, None, []], ["a", 1.5, {}]),
    ({"type": ["number", "string"], "minimum": 3, "maxLength": 2}, [3, "xx"], [2, "xxx", None]),
    # enum, const
    (
        {"enum": [1, 2.5, "a", None, True, [1], {"a": 1}]},
        [1, 2.5, "a", None, True, [1], {"a": 1}],
        [2, "b", [], [1, 1]],
    ),
    ({"enum": [1, {"a": 1}]}, [{"a": 1}], [{"a": 2}, {"a": 1, "b": 1}, {}]),
    ({"enum": ["a", "b", 1], "type": "string"}, ["a", "b"], [1, "c"]),
    ({"enum": ["a", None], "type": ["string", "null"]}, ["a", None], ["b"]),
    ({"enum": [6, 9], "minimum": 7}, [9], [6]),
    ({"enum": ['é😀\n"\\/']}, ['é😀\n"\\/'], ["é"]),
    ({"enum": [0]}, [0], [False, 1]),
    ({"const": 1}, [1], [2, 1.5, -1, 10, True]),
    ({"const": -0.5}, [-0.5], [0.5, -0.51]),
    ({"const": False}, [False], [0, True]),
    ({"const": {"a": [1, {"b": None}]}}, [{"a": [1, {"b": None}]}], [{"a": [1]}, {}]),
    ({"const": 2**53}, [2**53], [2**53 - 2]),
    # numbers
    ({"minimum": 1.1}, [2.6, 1.1, "x", None], [0.6]),
    ({"type": "number", "minimum": -2}, [-1, 0, -2, 1000], [-2.0001, -3]),
    ({"maximum": 3.0}, [2.6, 3, -5], [3.5]),
    ({"exclusiveMaximum": 3.0}, [2.2], [3, 3.5]),
    ({"exclusiveMinimum": 1.1}, [1.2], [1.1, 0.6]),
    ({"type": "integer", "exclusiveMinimum": 1, "maximum": 10}, [2, 10], [1, 11, 0, -5]),
    ({"type": "integer", "minimum": 1.5, "maximum": 3.5}, [2, 3], [1, 4]),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": 0}, [0.1], [0, -1]),
    ({"multipleOf": 2}, [10, 0, -4, "x"], [7, 3, -1]),
    ({"multipleOf": 1.5}, [0, 4.5, 3, -1.5], [35, 1]),
    ({"type": "number", "multipleOf": 0.01}, [4.02, 0, 1], [0.00751, 4.025]),
    ({"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7}, [0, 7, 98], [-7, 105, 8]),
    # strings
    (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["ab", "abc", "é😀", '\n\t"', "\\\\"],
        ["a", "abcd", "", "\n"],
    ),
    ({"minLength": 2}, ["foo", 1, None, {}], ["f"]),
    ({"maxLength": 2.0}, ["💩💩", 100], ["foo"]),
    ({"maxLength": 0}, [""], ["f"]),
    ({"pattern": "^a", "minLength": 3, "maxLength": 4}, ["abc", "abcd", 1], ["ab", "abcde", "bbc"]),
    ({"allOf": [{"pattern": "^a"}, {"pattern": "z$"}]}, ["az", "abz", 1], ["a", "z", "za"]),
    ({"pattern": r"^\d+$", "enum": ["12", "ab"]}, ["12"], ["ab"]),
    # arrays
    ({"items": INTEGER}, [[], [1, 2], {"foo": 1}, "x"], [[1, "x"]]),
    ({"type": "array", "items": False}, [[]], [[1]]),
    ({"items": True}, [[1, "a"]], []),
    ({"prefixItems": [INTEGER, STRING]}, [[1, "f"], [1], [], [1, "f", True]], [["f", 1], ["x"]]),
    ({"prefixItems": [{}, {}], "items": False}, [[], [1], [1, 2]], [[1, 2, 3]]),
    ({"items": False, "prefixItems": [{}, {}]}, [[1, 2]], [[1, 2, 3]]),
    (
        {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 2},
        [["a", 1]],
        [["a"], [1, 1], ["a", "b"]],
    ),
    ({"minItems": 1}, [[1], ""], [[]]),
    ({"maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ({"maxItems": 0}, [[]], [[1]]),
    ({"type": "array", "minItems": 2, "maxItems": 2}, [[1, 2]], [[1], [1, 2, 3], []]),
    # objects
    (ONLY_A, [{"a": 1}, {"a": 1, "b": "x"}, {"a": 1, "c": None}], [{"b": "x"}, {"a": "x"}, {}, {"a": 1, "b": 2}]),
    ({**ONLY_A, "additionalProperties": False}, [{"a": 1}, {"a": 1, "b": "x"}], [{"a": 1, "c": 1}, {"A": 1}]),
    ({"additionalProperties": False, **ONLY_A}, [{"a": 1}, {"a": 1, "b": "x"}], [{"a": 1, "c": 1}]),
    ({**ONLY_A, "additionalProperties": {"type": "boolean"}}, [{"a": 1, "c": True}], [{"a": 1, "c": 1}]),
    ({"additionalProperties": {"type": "boolean"}}, [{}, {"c": True}, 1], [{"c": 1}]),
    ({"properties": {"a": False, "b": True}}, [{}, {"b": 1}, {"c": 1}], [{"a": 1}, {"a": 1, "b": 2}]),
    ({"required": ["a"]}, [{"a": 1}, {"a": []}, 12], [{}, {"b": 1}]),
    ({"type": "object", "required": ["z", "y"], "properties": {"y": {}}}, [{"y": 1, "z": 2}], [{"y": 1}, {"z": 1}]),
    ({"minProperties": 1}, [{"a": 1}, 1], [{}]),
    ({"type": "object", "maxProperties": 2}, [{"a": 1, "b": 2}, {}], [{"a": 1, "b": 2, "c": 3}]),
    ({"type": "object", "maxProperties": 0}, [{}], [{"a": 1}]),
    ({"required": ["a", "b"], "minProperties": 3}, [{"a": 1, "b": 1, "c": 1}], [{"a": 1, "b": 1}]),
    ({"required": ["a"], "maxProperties": 2}, [{"a": 1, "b": 1}, {"a": 1}], [{"a": 1, "b": 1, "c": 1}, {"b": 1}]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
        [{"a": 1, "b": "x"}, {"a": 1}, {"b": 1}],
        [{}, {"c": 1}],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1, "additionalProperties": False},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    ({"patternProperties": {"f.*o": INTEGER}}, [{"foo": 1, "foooo": 2}, {}, {"b": "x"}, 12], [{"foo": "b"}]),
    (
        {"patternProperties": {"^a": INTEGER}, "additionalProperties": False},
        [{"a": 1, "ab": 1}, {}],
        [{"a": "x"}, {"b": 1}],
    ),
    (
        {"properties": {"ab": {"minimum": 3}}, "patternProperties": {"^a": INTEGER}, "additionalProperties": NULL},
        [{"ab": 3}, {"ab": 3, "ac": 1, "b": None}, {"ac": 1}],
        [{"ab": "x"}, {"ab": 2}, {"ab": 3.5}, {"b": 1}, {"ac": None}],
    ),
    ({"patternProperties": {"^a": INTEGER, "^b": False}}, [{"a": 1}, {"c": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"patternProperties": {"^a": INTEGER}, "required": ["ab"]}, [{"ab": 1}], [{"ab": "x"}, {}]),
    ({"patternProperties": {'^[^"]*$': INTEGER}, "additionalProperties": False}, [{"a": 1}], [{'"': 1}]),
    # anyOf, oneOf, allOf
    ({"anyOf": [INTEGER, {"minimum": 2}]}, [1, 2.5, 3, "x"], [1.5]),
    ({"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]}, ["a", "abcd"], ["abc", 1]),
    ({"anyOf": [True, False]}, [1, "x"], []),
    (
        {
            "anyOf": [
                {"items": {"type": "string", "pattern": "^a"}, "type": "array"},
                {"items": {"maxLength": 2}, "type": "array"},
            ]
        },
        [["a", "abc"], ["b", "bc"], ["ab"]],
        [["bcd"], ["abc", "b"], ["b", "abc"]],
    ),
    (
        {"anyOf": [kind("a"), kind("b", x=STRING)]},
        [{"kind": "a"}, {"kind": "b", "x": "y"}],
        [{"kind": "a", "x": "y"}, {}],
    ),
    (
        {"properties": {"a": INTEGER}, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        [{"a": 1, "b": 1}],
        [{"a": 1}, {}],
    ),
    ({"oneOf": [INTEGER, STRING]}, [1, "a"], [True, 1.5]),
    ({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]}, ["a", "b", "c"], ["d"]),
    ({"oneOf": [{"const": "a", "minLength": 2}, {"const": "b"}]}, ["b"], ["a"]),
    ({"oneOf": [{"oneOf": [STRING, INTEGER]}, NULL]}, ["a", 1, None], [True]),
    (
        {"oneOf": [kind("a", x=INTEGER), kind("b", y=STRING)]},
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "b", "x": 1}],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"A": kind("a", next={"$ref": "#"}), "B": kind("b")},
        },
        [{"kind": "a"}, {"kind": "b"}, {"kind": "a", "next": {"kind": "b"}}],
        [{"kind": "c"}, {"kind": "a", "next": {"kind": "c"}}],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                {"type": "object", "properties": {"a": STRING}},
            ]
        },
        [{"a": 1}, {"a": "x"}, {"b": 1}, {}],
        [{"a": True}],
    ),
    ({"allOf": [{"oneOf": [STRING, INTEGER]}, {"oneOf": [STRING, NULL]}]}, ["a"], [1, None]),
    ({"oneOf": [{"const": 1}, {"const": 2.0}, {"enum": [True, "a"]}]}, [1, 2, True, "a"], [3, False]),
    ({"oneOf": [STRING], "anyOf": [{"maxLength": 2}, {"minimum": 5}]}, ["ab", "abc"], [6, 1]),
    ({"oneOf": [ONLY_A, {"required": ["a"], "properties": {"a": STRING}}]}, [{"a": 1}, {"a": "x"}, 5], [{"a": None}]),
    ({"oneOf": [kind("a"), False, {"allOf": [kind("b"), True]}]}, [{"kind": "a"}, {"kind": "b"}], [{"kind": "c"}]),
    (
        # A tree whose branches are alternatives again.
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {"oneOf": [{"$ref": "#/$defs/branch"}, {"$ref": "#/$defs/leaf"}]},
                "branch": kind("branch", of={"type": "array", "items": {"$ref": "#/$defs/tree"}}),
                "leaf": {"$ref": "#/$defs/named"},
                "named": kind("leaf", next={"oneOf": [{"$ref": "#/$defs/named"}, NULL]}),
            },
        },
        [{"kind": "branch", "of": [{"kind": "leaf"}, {"kind": "branch"}]}, {"kind": "leaf", "next": {"kind": "leaf"}}],
        [{"kind": "branch", "of": [{}]}, {"kind": "leaf", "next": {"kind": "branch"}}],
    ),
    ({"allOf": [{"maximum": 30}, {"minimum": 20}]}, [25, "x"], [35, 10]),
    ({"allOf": [{"properties": {"a": INTEGER}}, {"additionalProperties": False}]}, [{}, 1], [{"a": 1}, {"b": 1}]),
    (
        {"allOf": [{"multipleOf": 2}], "anyOf": [{"multipleOf": 3}], "oneOf": [{"multipleOf": 5}]},
        [30, 0],
        [2, 3, 5, 6, 10, 15],
    ),
    (
        {
            "properties": {"bar": INTEGER},
            "required": ["bar"],
            "allOf": [{"properties": {"foo": STRING}, "required": ["foo"]}, {"required": ["baz"]}],
        },
        [{"bar": 2, "foo": "x", "baz": None}],
        [{"foo": "x", "baz": None}, {"bar": 2, "foo": "x"}, {"bar": 2, "foo": 1, "baz": 1}],
    ),
    (
        {"allOf": [{"prefixItems": [INTEGER], "items": STRING}, {"items": {"minLength": 2}}]},
        [[1, "ab"]],
        [["a"], [1, "a"], [1, 1]],
    ),
    ({"allOf": [{"patternProperties": {"^a": INTEGER}}, {"additionalProperties": False}]}, [{}], [{"a": 1}]),
    (
        {"allOf": [{"patternProperties": {"^a": INTEGER}}, {"patternProperties": {"^a": {"minimum": 2}}}]},
        [{"a": 2}],
        [{"a": 1}],
    ),
    (
        {"patternProperties": {"^a": INTEGER}, "allOf": [{"properties": {"ab": {"minimum": 3}}}]},
        [{"ab": 3}],
        [{"ab": 2}, {"ac": "x"}],
    ),
    # $ref
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, [1], ["x"]),
    (
        {
            "$ref": "#/definitions/c",
            "definitions": {"a": INTEGER, "b": {"$ref": "#/definitions/a"}, "c": {"$ref": "#/definitions/b"}},
        },
        [5],
        ["a"],
    ),
    (
        {"properties": {"foo": {"$ref": "#"}}, "additionalProperties": False},
        [{"foo": {"foo": {}}}, {}],
        [{"foo": {"bar": 1}}],
    ),
    ({"properties": {"foo": INTEGER, "bar": {"$ref": "#/properties/foo"}}}, [{"bar": 3}], [{"bar": "x"}]),
    ({"prefixItems": [INTEGER, {"$ref": "#/prefixItems/0"}]}, [[1, 2]], [[1, "f"]]),
    (
        {"$defs": {"r": {"type": "array"}}, "properties": {"foo": {"$ref": "#/$defs/r", "maxItems": 2}}},
        [{"foo": []}],
        [{"foo": [1, 2, 3]}, {"foo": "s"}],
    ),
    (
        {
            "$defs": {"a~b": INTEGER, "a/b": INTEGER, "a%b": INTEGER, "a b": INTEGER},
            "items": {
                "anyOf": [
                    {"$ref": "#/$defs/a~0b"},
                    {"$ref": "#/$defs/a~1b"},
                    {"$ref": "#/$defs/a%25b"},
                    {"$ref": "#/$defs/a%20b"},
                ]
            },
        },
        [[1]],
        [["x"]],
    ),
    ({"properties": {"$ref": STRING}}, [{"$ref": "a"}], [{"$ref": 2}]),
    (
        {"properties": {"a": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["a"], "type": "object"},
        [{"a": {"a": None}}],
        [{"a": {}}, {}],
    ),
    # annotations
    (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "$id": "x",
            "title": 1,
            "default": "x",
            "const": 1,
            "$comment": "c",
        },
        [1],
        [2],
    ),
    (
        {"properties": {"title": INTEGER, "default": {"description": "d", "examples": ["x"]}}},
        [{"title": 1}],
        [{"title": "x"}],
    ),
]

# pattern, strings that must be accepted, strings that must be refused
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ("^a*$", ["", "aa"], ["b", "ab"]),
    ("a+", ["xxaayy", "a"], ["xx", ""]),
    ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
    ("(^|x)a", ["ab", "yxa"], ["ya"]),
    ("a(b|$)", ["a", "xab"], ["ac"]),
    ("", ["", "x"], []),
    (r"^\^\$$", ["^$"], [""]),
    ("^[$^]$", ["$", "^"], ["a"]),
    (r"^\d{3}$", ["123"], ["12", "1234", "१२३"]),
    (r"^\w+$", ["ab_9"], ["a b", "é"]),
    (r"^\W\D$", ["é ", '""', "\\\\"], ["a1"]),
    (r"^\s\S$", ["\ufeffa", "\na", " \\", '\t"'], ["a ", "  ", "\u0085a"]),
    ("^.$", ["a", "é", "😀", '"', "\\"], ["\n", "\r", "\u2028", "ab", ""]),
    (r"^[\s\S]*$", ['a\n"', ""], []),
    ("^[^a]$", ["b", "\n", '"'], ["a"]),
    ('^[^"]*$', ["abc", "\n", "\\"], ['"', 'a"', '""']),
    (r"^[^\\]*$", ["abc", '"'], ["\\", "a\\"]),
    (r'^[^"\\]*$', ["abc", "\t"], ["\\", '"']),
    (r'^([^"]|\n)[^"\n]$', ["\na", "ab"], ["a\n", 'a"', '"a']),
    (r'^[^\w"]$', ["é", " "], ["a", '"']),
    ("^[a-z]{2,4}$", ["ab", "abcd"], ["a", "abcde"]),
    (r"^\p{L}+$", ["aé"], ["1"]),
    ("^(?:a|b)+?$", ["ab"], ["c"]),
    ("^(?<year>[0-9]{4})$", ["2026"], ["26"]),
    (r"^a\/b/c$", ["a/b/c"], ["ab"]),
    (r"^\u0061\x62$", ["ab"], ["a"]),
    (r"^[\w.-]+@[\w.-]+$", ["a.b@c-d.e"], ["a b@c"]),
    (r'^"\\\n\t$', ['"\\\n\t'], ["a"]),
    (r"^\$\d+\.\d{2}$", ["$5.00"], ["5.00", "$5x00"]),
]

# format, strings that must be accepted, strings that must be refused
FORMATS: list[tuple[str, list[str], list[str]]] = [
    (
        "date-time",
        ["1963-06-19T08:30:06.283185Z", "1937-01-01T12:00:27.87+00:20", "2020-02-29t00:00:00z"],
        [
            "1990-02-31T15:59:59Z",
            "1990-12-31T15:59:59-24:00",
            "1963-06-19T08:30:06+01:00Z",
            "2013-350T01:01:01",
            "1998-12-31T23:58:60Z",
            "2021-02-29T00:00:00Z",
            "2021-02-28",
        ],
    ),
    (
        "date",
        ["1963-06-19", "2020-02-29", "2000-02-29"],
        ["2021-02-29", "1900-02-29", "2020-01-32", "2020-13-01", "1998-1-20", "2020-04-31", "20230328"],
    ),
    (
        "time",
        ["08:30:06Z", "23:59:59.5+01:00"],
        ["08:30:06", "24:00:00Z", "00:60:00Z", "22:59:60Z", "08:30:06-8:000", "01:02:03Z+00:30"],
    ),
    ("duration", ["P4DT12H30M5S", "P4Y", "PT0S", "P2W"], ["PT1D", "4DT12H", "P", "P1YT", "P2D1Y", "P1", "P1Y2W"]),
    (
        "email",
        ["joe.bloggs@example.com", "te~st@example.com", "a+b@x.co"],
        [
            "2962",
            "te..st@example.com",
            ".test@example.com",
            "test.@example.com",
            "joe@invalid=domain.com",
            "a@x, b@y",
            "joe@[127.0.0.300]",
        ],
    ),
    (
        "hostname",
        ["www.example.com", "1host", "a" * 63 + ".com"],
        ["-a", "a_b", "a..b", "host-", "a" * 64, "hostname.", "", ("a" * 60 + ".") * 4 + "a" * 30],
    ),
    (
        "ipv4",
        ["192.168.0.1", "255.255.255.255"],
        ["127.0.0.0.1", "256.1.1.1", "127.0", "087.10.0.1", "1.2.3.4/24", "1২7.0.0.1"],
    ),
    (
        "ipv6",
        ["::1", "::", "1:2:3:4:5:6:7:8", "1::8", "d6::"],
        ["12345::", "1:2:3:4:5:6:7", "::1::", "fe80::a%eth1", ":2:3:4:5:6:7:8", "1:2::3:4:5:6:7:8", "1::2::3"],
    ),
    (
        "uuid",
        ["2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
        ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811eab4aa73b441d16380"],
    ),
    (
        "uri",
        ["http://foo.bar/?baz=qux#quux", "ldap://[2001:db8::7]/c=GB?one", "urn:a:b", "mailto:a@b.c"],
        ["//foo.bar", "/abc", "abc", "http:// x", ":// x", "https://e.org/a\\b", "https://e.org/a b", "http://a/%zz"],
    ),
]

# schema, texts that must be accepted, texts that must be refused
TEXTS: list[tuple[Any, list[str], list[str]]] = [
    (INTEGER, ["-0"], ["01", "+1", "1.", "- 1", "1e-1", "", " 1", "1 "]),
    ({"type": "number"}, ["1.0", "1e3", "-0", "1E+2"], ["01", "+1", ".5", "1.", "NaN", "Infinity", "0x1"]),
    ({"type": "number", "minimum": 5}, ["5.0", "50", "6"], ["4", "4.9", "1e0", "5e-1", "10e-1", "-6", "5E-1"]),
    ({"type": "number", "maximum": 3.0}, ["2.6", "3.0", "-5"], ["1e1", "0.4e1", "300e-1", "3.01"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "0.0001"], ["0.0", "-0.0", "0", "0.00"]),
    ({"type": "number", "multipleOf": 2}, ["4"], ["4.1", "3.0", "1e0", "5e-1", "2e-1"]),
    ({"const": 1.5}, ["1.5"], ["1", "1.51"]),
    (STRING, ['"a"', '"\\n\\"\\\\"'], ["'a'", '"\n"', '"\\x"', '"\\ud800"', '"a" ', '"\x7f"']),
    ({"type": "object"}, ["{}", '{"a":[1,2],"b":{}}', '{"a": [1, 2], "b": {}}'], ['{"a":1,}', "{'a':1}", "{}{}"]),
    ({"type": "object"}, [], ["{} ", " {}", "{ }", '{"a":  1}', '{"a" :1}', '{"a":1 }', '{"a":\n1}', '{"a":[ 1]}']),
    # A second way to write a key would lead past its schema.
    ({"properties": {"a": INTEGER}}, ['{"a":1}'], ['{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"b":1,"a":"x"}']),
    ({"properties": {'a"b': INTEGER}}, ['{"a\\"b":1}'], ['{"a\\u0022b":"x"}', '{"a\\"b":"x"}']),
    ({"properties": {"n\n": INTEGER}}, ['{"n\\n":2}'], ['{"n\\u000a":"x"}', '{"n\n":2}']),
    # The order of properties is the schema's, then what is only required, then all else.
    (ONLY_A, ['{"a":1,"b":"x","c":1,"c":2}'], ['{"b":"x","a":1}', '{"c":1,"a":1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), VALUES, ids=lambda value: json.dumps(value)[:60])
def test_an_answer_is_what_the_schema_allows(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    assert [v for v in valid if not accepts(schema, json.dumps(v, ensure_ascii=False))] == []
    assert [v for v in invalid if accepts(schema, json.dumps(v, ensure_ascii=False))] == []


@pytest.mark.parametrize(("schema", "valid", "invalid"), TEXTS, ids=lambda value: json.dumps(value)[:60])
def test_an_answer_is_json_as_it_is_written(schema: Any, valid: list[str], invalid: list[str]) -> None:
    assert [text for text in valid if not accepts(schema, text)] == []
    assert [text for text in invalid if accepts(schema, text)] == []


@pytest.mark.parametrize(("pattern", "valid", "invalid"), PATTERNS, ids=lambda value: repr(value)[:40])
def test_a_string_matches_its_pattern(pattern: str, valid: list[str], invalid: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in valid if not accepts(schema, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in invalid if accepts(schema, json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize(("format_", "valid", "invalid"), FORMATS, ids=lambda value: str(value)[:20])
def test_a_string_has_its_format(format_: str, valid: list[str], invalid: list[str]) -> None:
    for schema in ({"format": format_}, {"format": format_, "pattern": ".", "type": "string"}):
        assert [text for text in valid if not accepts(schema, json.dumps(text))] == []
        assert [text for text in invalid if accepts(schema, json.dumps(text, ensure_ascii=False))] == []
    assert accepts({"format": format_}, "1")


def nested(depth: int) -> dict[str, Any]:
    """A property in a property in a property …"""
    schema: dict[str, Any] = {"type": "string"}
    for i in range(depth):
        schema = {"type": "object", "properties": {f"p{depth - i}": schema}, "required": [f"p{depth - i}"]}
    return schema


# schema, path of the keyword, part of the message
REFUSED: list[tuple[Any, str, str]] = [
    *(
        ({"properties": {"a": {keyword: value}}}, f"properties.a.{keyword}", f"{keyword!r} is not enforced")
        for keyword, value in {
            "uniqueItems": True,
            "contains": {},
            "minContains": 1,
            "maxContains": 1,
            "not": {},
            "if": {},
            "then": {},
            "else": {},
            "propertyNames": {},
            "dependentRequired": {},
            "dependentSchemas": {},
            "dependencies": {},
            "unevaluatedProperties": False,
            "unevaluatedItems": False,
            "additionalItems": False,
            "contentEncoding": "base64",
            "contentSchema": {},
            "$anchor": "a",
            "$dynamicRef": "#a",
            "$dynamicAnchor": "a",
            "$id": "x",
            "nullable": True,
            "requird": ["a"],
            "x-guidance": {"lenient": True},
        }.items()
    ),
    ([], "", "a schema is an object, true or false"),
    ("string", "", "a schema is an object"),
    (None, "", "a schema is an object"),
    (False, "", "allows nothing"),
    ({"properties": {"a": None}}, "properties.a", "a schema is an object"),
    ({"items": 1}, "items", "a schema is an object"),
    ({"items": [INTEGER]}, "items", "`prefixItems` since"),
    ({"prefixItems": {}}, "prefixItems", "not a list of at least one schema"),
    ({"anyOf": []}, "anyOf", "not a list of at least one schema"),
    ({"properties": []}, "properties", "not an object of schemas"),
    ({"patternProperties": []}, "patternProperties", "not an object of schemas"),
    ({"type": "nope"}, "type", "is not one or several of"),
    ({"type": ["string", "string"]}, "type", "is not one or several of"),
    ({"type": []}, "type", "is not one or several of"),
    ({"type": 5}, "type", "is not one or several of"),
    ({"enum": []}, "enum", "at least one value"),
    ({"enum": ["a", ["\x01"]]}, "enum.1.0", "holds the character '\\x01'"),
    ({"const": {"\x7f": 1}}, "const", "holds the character '\\x7f'"),
    ({"const": 2**53 + 1}, "const", "not a number between"),
    ({"minimum": "1"}, "minimum", "not a number"),
    ({"exclusiveMinimum": True}, "exclusiveMinimum", "not a number"),
    ({"maximum": float("inf")}, "maximum", "not a number"),
    ({"minimum": 3, "maximum": 2.5}, "minimum", "minimum 3 is more than maximum 2.5"),
    ({"minimum": 1e-300, "type": "number"}, "minimum", "nested parentheses"),
    ({"type": "integer", "minimum": 5, "exclusiveMaximum": 5}, "minimum", "is equal to exclusiveMaximum"),
    ({"multipleOf": 0}, "multipleOf", "not more than 0"),
    ({"multipleOf": 123456789}, "multipleOf", "no common multiple"),
    ({"multipleOf": 1e-300}, "multipleOf", "no common multiple"),
    ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "allOf.1.multipleOf", "no common multiple"),
    ({"minLength": -1}, "minLength", "not a whole number"),
    ({"maxLength": "2"}, "maxLength", "not a whole number"),
    ({"minItems": 1.5}, "minItems", "not a whole number"),
    ({"minItems": True}, "minItems", "not a whole number"),
    ({"properties": {"s": {"maxLength": 65536}}}, "properties.s.maxLength", f"beyond the limit of {MAX_LENGTH}"),
    ({"maxItems": 100_000}, "maxItems", f"the limit of {MAX_ITEMS}"),
    ({"minItems": 5, "maxItems": 2}, "minItems", "minItems 5 is more than maxItems 2"),
    ({"minLength": 5, "maxLength": 2}, "minLength", "minLength 5 is more than maxLength 2"),
    ({"type": "object", "minProperties": 2}, "minProperties", "is not enforced"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "minProperties", "only supported when"),
    ({"required": "a"}, "required", "not a list of names"),
    ({"required": [1]}, "required", "not a list of names"),
    ({"required": ["a", "a"]}, "required", "twice"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required", "'a' is unsatisfiable"),
    ({"type": "string", "enum": [1]}, "enum", "incompatible types"),
    ({"pattern": 1}, "pattern", "not a regular expression"),
    ({"pattern": "(a"}, "pattern", "unclosed group"),
    ({"pattern": "^a$", "maxLength": 0, "type": "string"}, "pattern", "empty"),
    ({"patternProperties": {"(?=a)": {}}}, "patternProperties.(?=a)", "look-around"),
    ({"patternProperties": {"^a": INTEGER, "b$": STRING}}, "patternProperties", "not disjoint"),
    ({"format": "json-pointer"}, "format", "'json-pointer' is not enforced here; use date, date-time"),
    ({"format": 1}, "format", "is not enforced"),
    ({"oneOf": [INTEGER, {"minimum": 2}]}, "oneOf", "may both be fulfilled"),
    ({"oneOf": [{"type": "number"}, INTEGER]}, "oneOf", "may both be fulfilled"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf", "may both be fulfilled"),
    ({"oneOf": [True, INTEGER]}, "oneOf", "may both be fulfilled"),
    ({"oneOf": [{"items": INTEGER, "type": "array"}, {"items": STRING, "type": "array"}]}, "oneOf", "may both be"),
    ({"oneOf": [{"properties": {"a": INTEGER}}, {"properties": {"a": STRING}}]}, "oneOf", "may both be fulfilled"),
    ({"oneOf": [ONLY_A, {"required": ["a"], "properties": {"a": {"type": "number"}}}]}, "oneOf", "may both be"),
    ({"oneOf": [{"enum": ["a", "b"]}, {"const": "a"}]}, "oneOf", "may both be fulfilled"),
    ({"properties": {"a": {"oneOf": [kind("a"), kind("a", x=INTEGER)]}}}, "properties.a.oneOf", "may both be"),
    ({"$ref": "#/$defs/nope"}, "$ref", "'#/$defs/nope' is no schema"),
    ({"$ref": "#/title", "title": "x"}, "$ref", "is no schema"),
    ({"$ref": "https://example.org/schema"}, "$ref", "not a place in this schema"),
    ({"$ref": "#name"}, "$ref", "not a place in this schema"),
    ({"$ref": 1}, "$ref", "not a place in this schema"),
    ({"$ref": "#"}, "$ref", "refers to itself"),
    ({"anyOf": [{"$ref": "#"}, STRING]}, "anyOf.0.$ref", "refers to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}, "$defs.a.$ref", "refers to itself"),
    ({"properties": {f"p{i}": {} for i in range(MAX_OPTIONAL + 1)}}, "properties", f"the limit is {MAX_OPTIONAL}"),
    ({"oneOf": [kind(f"k{i}") for i in range(400)]}, "oneOf", "may both be fulfilled"),
    ({"enum": ["a" * MAX_BYTES]}, "", f"the limit is {MAX_BYTES}"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "message"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_not_enforced_is_refused_by_its_path(schema: Any, path: str, message: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        json_schema_constraint(schema, "response_format.json_schema.schema")
    assert message in caught.value.message
    assert caught.value.param == f"response_format.json_schema.schema.{path}".rstrip(".")
    assert caught.value.message.startswith(caught.value.param)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?!a)", "(?<=a)b", "(?i)a", "(?P<n>a)", r"(a)\1", "a^b", "a$b", "(", "*", "a{,3}", "{a}", "a{2000}"]
    + [r"\bfoo", r"\cA", r"\0", r"\x00", r"\u0000", r"\ud800", "\0", r"\p{P}", r"\P{L}", r"\z", "\\"]
    + ["[", "[a", "[]a]", "[^]", "[[:alpha:]]", "[a&&b]", r"[\b]"],
)
def test_a_pattern_that_is_not_enforced_as_ecma_262_has_it_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        json_schema_constraint({"type": "string", "pattern": pattern}, "schema")
    assert caught.value.param == "schema.pattern"


def test_sixty_nested_properties_are_refused_by_the_path_where_they_are_too_deep() -> None:
    json_schema_constraint(nested(MAX_DEPTH // 2), "schema")
    with pytest.raises(UnsupportedSchema, match=f"nested more than {MAX_DEPTH} deep") as caught:
        json_schema_constraint(nested(60), "schema")
    assert caught.value.param == "schema" + "".join(f".properties.p{i + 1}" for i in range(MAX_DEPTH // 2 + 1))
    with pytest.raises(UnsupportedSchema, match="nested more than"):
        json_schema_constraint({"const": json.loads("[" * 500 + "]" * 500)}, "schema")


NAMES = [f"p{i}" for i in range(1000)]
LARGE: dict[str, Any] = {
    "items": {"type": "array", "items": {"type": "number"}, "minItems": 10, "maxItems": MAX_ITEMS},
    "nested items": {"type": "array", "items": {"type": "array", "maxItems": MAX_ITEMS}, "maxItems": MAX_ITEMS},
    "length": {"type": "string", "minLength": 5000, "maxLength": MAX_LENGTH},
    "depth": nested(MAX_DEPTH // 2),
    "optional": {"type": "object", "properties": {f"p{i}": STRING for i in range(MAX_OPTIONAL)}},
    "required": {"properties": {name: {"maxLength": i} for i, name in enumerate(NAMES)}, "required": NAMES},
    "enum": {"enum": [f"value {i}" for i in range(4000)]},
    "anyOf": {"anyOf": [kind(f"k{i}", **{f"a{i}": INTEGER}) for i in range(300)]},
    "oneOf": {"oneOf": [kind(f"k{i}", x={"$ref": "#"}) for i in range(150)]},
    "pattern": {"type": "string", "pattern": "^(?:[a-z]{0,100},){0,100}$"},
}


@pytest.mark.parametrize("schema", LARGE.values(), ids=LARGE.keys())
def test_a_schema_within_the_limits_compiles_within_two_seconds(schema: Any) -> None:
    began = time.process_time()
    FakeVocab().check_constraint(json_schema_constraint(schema, "schema"))
    assert time.process_time() - began < 2
