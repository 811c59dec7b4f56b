from __future__ import annotations

import subprocess
import sys
import time

import pytest

from shared.errors import InvalidGrammar
from worker.grammar import MAX_BYTES, check
from worker.llama_backend import LlamaBackend

CHAIN = "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} | r{i + 1} "x"' for i in range(60)) + '\nr60 ::= "a"'

REFUSED = [
    ("root ::= foo", "the rule 'foo' is used but not defined"),
    ('root ::= root "a" | "b"', "'root' can call itself before it reads"),
    ('root ::= a root "y" | "x"\na ::= b\nb ::= "" | "x"', "'root' can call itself before it reads"),
    ('root ::= ("x" | root)+', "'root' can call itself before it reads"),
    ('root ::= a\na ::= b | "x"\nb ::= c?\nc ::= a', "can call itself before it reads"),
    ('root ::= "a"{5,2}', "allows no repetition"),
    ('root ::= ("a"?){0,5}', "may not be repeated more than 4 times"),
    ('root ::= x*\nx ::= "a" | ""', "may not be repeated without end"),
    (CHAIN, "can begin in more than 1024 ways"),
    ("root ::= " + " | ".join(f'"item {i}"' for i in range(2000)), "can begin in more than 1024 ways"),
    ('root ::= "' + "a" * 1000 + '"{1000}', "it grows to 1000000 elements"),
    ('root ::= "' + "a" * MAX_BYTES + '"', "the limit is 65536"),
    ('root ::= "a\0"', "zero character"),
    ('root ::= "\ud800"', "surrogate"),
    ("", "there are no rules"),
]


@pytest.mark.parametrize(("grammar", "message"), REFUSED)
def test_what_would_harm_the_worker_is_refused_at_once(grammar: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidGrammar, match=message) as caught:
        check(grammar, "root")
    assert caught.value.param == "grammar"
    assert time.process_time() - began < 1


@pytest.mark.parametrize("root", ["Root", "other", "", "(0", "a b"])
def test_a_root_that_is_not_a_rule_is_refused(root: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        check('root ::= ("a")*', root)
    assert caught.value.param == "grammar_root"


@pytest.mark.model
@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= ((("a"*)*)+)? "b"',
        "root ::= " + "(" * 60 + '"a"' + ")" * 60,
        'root ::= ("' + "a" * 1000 + '"){1000}',
        "root ::= [0-9]{0,1000}",
        'root ::= item ("," item)*\nitem ::= "{" ws root? ws "}" ws\nws ::= [ \\t\\n]*',
        "root ::= " + " | ".join(f'"item {i}"' for i in range(500)),
        "root ::= <|im_end|> !<[7]>",
        "root ::=",
    ],
)
def test_what_is_let_through_compiles_within_a_second(llama: LlamaBackend, grammar: str) -> None:
    began = time.process_time()
    llama.vocab.check_grammar(grammar, "root")
    assert time.process_time() - began < 1


@pytest.mark.model
@pytest.mark.parametrize("token", ["<nothing like it>", "<[49152]>", "<[999999999999]>"])
def test_a_token_the_model_does_not_have_is_refused(llama: LlamaBackend, token: str) -> None:
    with pytest.raises(InvalidGrammar, match="not a token of the model"):
        llama.vocab.check_grammar(f'root ::= "a" {token}', "root")


@pytest.mark.model
def test_refusals_leave_stderr_clean(llama: LlamaBackend, capfd: pytest.CaptureFixture[str]) -> None:
    for grammar, _ in REFUSED:
        with pytest.raises(InvalidGrammar):
            llama.vocab.check_grammar(grammar, "root")
    assert capfd.readouterr() == ("", "")


def test_limits_are_checked_without_llama_cpp() -> None:
    """Except that compiling needs it, the module could be used on the web side."""
    code = "import sys; sys.modules['llama_cpp'] = None; from worker.gbnf import parse; parse('root ::= \"a\"')"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
