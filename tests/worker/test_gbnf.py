from __future__ import annotations

import pytest

from worker.gbnf import GrammarSyntaxError, Item, parse


def test_rules_groups_and_repetitions_are_read() -> None:
    rules = parse('root ::= "ab" x{2,3} # a comment\n  \nx ::= ([a-c] | .)* | <|im_end|>\n')
    assert rules.rules["root"] == [[Item(None, 2), Item("x", 1, 2, 3)]]
    assert rules.rules["x"] == [[Item("(2", 1, 0, None)], [Item(None, 1)]]
    assert rules.rules["(2"] == [[Item(None, 3)], [Item(None, 1)]]
    assert rules.tokens == ["<|im_end|>"]


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a"',
        "root ::=",
        'root ::= | "a"',
        'root ::=\n  "a" |\n  "b"',
        'root ::= ( "a"\n | "b" )\n',
        'root ::= "a"\r\nb-2 ::= "c"\r\n',
        'root ::= "a" { 2 , 3 } "b"{4} "c"{5,}',
        r'root ::= [a-z-] [^\]\-"] [-a] "\U0001F600\u00e9\x41\n\t\r\\\"\[\]"',
        'root ::= "😀" [α-ω]+',
        "root ::= !<[7]> <[8]>",
        'root ::= "#"',
    ],
)
def test_what_llama_cpp_reads_is_read(text: str) -> None:
    assert "root" in parse(text).rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no rules"),
        ("# nothing\n", "there are no rules"),
        ('root ::= "a', "line 1: this is empty, does not end"),
        (r'root ::= "\q"', "unknown escape"),
        (r'root ::= "\x4"', "unknown escape"),
        ("root ::= []", "line 1: this is empty"),
        ("root ::= [^]", "line 1: this is empty"),
        ('root ::= ("a"', r"line 1: expected \)"),
        ('root ::= "a")', "line 1: expected the end of the line"),
        ('root ::= "a"\n | "b"', "line 2: expected the name of a rule"),
        ('my_rule ::= "a"', "line 1: expected ::="),
        ('root = "a"', "line 1: expected ::="),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ("root ::= *", "line 1: expected the end of the line"),
        ('root ::= "a"*{2}', "two repetitions in a row"),
        ('root ::= ""*', "cannot be repeated"),
        ('root ::= "a"{5,2}', r"\{5,2\} allows no repetition"),
        ('root ::= "a"{0}', r"\{0\} allows no repetition"),
        ('root ::= "a"{,3}', "expected a repetition"),
        ('root ::= "a"{0,100000}', "repeats more than 1000 times"),
        ('root ::= "a"{99999999999999999999}', "expected a repetition"),
        ('root ::= ([a-z]{1,60} " "){1,60}', "too long for what it repeats"),
        ("root ::= " + "(" * 65, "nested more than 64 deep"),
        ("root ::= " + "(" * 60_000, "nested more than 64 deep"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(GrammarSyntaxError, match=message):
        parse(text)
