"""What the scripted model knows: a vocabulary of bytes, and rules that say which token comes next.

Every byte has two tokens. `tokenize` makes *typed* ones (0 to 255) and the scripts answer with *spoken* ones
(260 to 515), so a script sees from the sequence alone where the prompt ends: at the first spoken token. It needs no
other state, and a request that is resumed as prompt + answer so far goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import zlib
from array import array
from collections.abc import Callable, Sequence

from shared.errors import InvalidGrammar
from worker.matcher import ConstraintCompiler, Spelling

BOS, EOS, IM_START, IM_END, SPOKEN = 256, 257, 258, 259, 260
N_TOKENS = SPOKEN + 256

CONTROL = {"<|bos|>": BOS, "<|eos|>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: The next token of a sequence, given the sequence and the length of its prompt.
Script = Callable[[Sequence[int], int], int]

_SPELLING = {token: text for text, token in CONTROL.items()}
_CONTROL_TEXT = re.compile("|".join(map(re.escape, CONTROL)))
_HARM = re.compile(rb"(?P<harm>poison|stall) (?P<at>\d+)")
_GRAMMAR = re.compile(r'\s*(?P<root>[a-zA-Z][\w-]*)\s*::=\s*"(?P<text>[^"\\\n]*)"(?P<dead>\s*\[\])?\s*')


class FakeVocab:
    """The `Vocabulary` of the scripted model: one token for each byte of UTF-8, so four for an emoji."""

    n_tokens = N_TOKENS
    bos: int | None = BOS
    eos: int | None = EOS
    eog = frozenset({EOS, IM_END})

    def __init__(self, *, adds_bos: bool = False, closing: int | None = None) -> None:
        self.adds_bos = adds_bos
        self.closing = closing
        self.constraints = ConstraintCompiler(self._spelling)

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """See `Vocabulary`. A lone surrogate becomes a question mark."""
        if not parse_special:
            return list(text.encode(errors="replace"))
        tokens: list[int] = []
        end = 0
        for match in _CONTROL_TEXT.finditer(text):
            tokens += [*text[end : match.start()].encode(errors="replace"), CONTROL[match[0]]]
            end = match.end()
        return [*tokens, *text[end:].encode(errors="replace")]

    def piece(self, token: int) -> bytes:
        """See `Vocabulary`."""
        value = as_byte(token)
        return b"" if value is None else bytes([value])

    def token_text(self, token: int) -> str:
        """See `Vocabulary`. Bytes beyond ASCII are spelt as in Latin-1."""
        return _SPELLING.get(token) or self.piece(token).decode("latin-1")

    def control_texts(self) -> frozenset[str]:
        """See `Vocabulary`."""
        return frozenset(CONTROL)

    def check_grammar(self, grammar: str, root: str) -> None:
        """See `Vocabulary`."""
        parse_grammar(grammar, root)

    def check_constraint(self, constraint: str) -> None:
        """See `Vocabulary`."""
        self.constraints.compile(constraint)

    def _spelling(self) -> Spelling:
        """An answer consists of spoken tokens; typed ones are of no use to a constraint."""
        tokens = [_SPELLING.get(t, "").encode() or self.piece(t) if t >= BOS else b"" for t in range(N_TOKENS)]
        return Spelling(tokens, _SPELLING, self.eog)


def as_byte(token: int) -> int | None:
    """The byte a token stands for, typed or spoken; None for control tokens."""
    if token >= SPOKEN:
        return token - SPOKEN
    return token if token < BOS else None


def parse_grammar(grammar: str, root: str) -> tuple[bytes, bool]:
    """The one text a grammar allows, and whether a dead end follows it.

    The scripted model knows grammars of two forms only: `root ::= "text"` and, for a dead end, `root ::= "text" []`.

    Raises:
        InvalidGrammar: any other grammar.
    """
    match = _GRAMMAR.fullmatch(grammar)
    if match is None:
        message = 'the scripted model knows only grammars of the form root ::= "text", or root ::= "text" []'
        raise InvalidGrammar(message, "grammar")
    if match["root"] != root:
        raise InvalidGrammar(f"the grammar has no rule {root!r}", "grammar_root")
    return match["text"].encode(), match["dead"] is not None


def echo(tokens: Sequence[int], prompt_len: int) -> int:
    """Repeat the prompt, of a chat the last whole message, then end; past that end, begin again."""
    source = _echo_source(tokens, prompt_len)
    spoken = len(tokens) - prompt_len
    if not source or (spoken and spoken % len(source) == 0):
        return EOS
    return SPOKEN + source[spoken % len(source)]


def echo_again(tokens: Sequence[int], prompt_len: int) -> int:
    """Like `echo`, but goes on where `echo` ends. It is what comes instead of a forbidden end."""
    source = _echo_source(tokens, prompt_len) or b" "
    return SPOKEN + source[(len(tokens) - prompt_len) % len(source)]


def count(tokens: Sequence[int], prompt_len: int) -> int:
    """Count `1 2 3 …` without end, from the place the answer has reached."""
    spoken, digits, numbers = len(tokens) - prompt_len, 1, 9
    while spoken >= numbers * (digits + 1):
        spoken -= numbers * (digits + 1)
        digits, numbers = digits + 1, numbers * 10
    number, place = divmod(spoken, digits + 1)
    return SPOKEN + f"{10 ** (digits - 1) + number} ".encode()[place]


def babble(tokens: Sequence[int], prompt_len: int) -> int:
    """Letters drawn from a checksum of the whole sequence, without end: one wrong token changes all that follow."""
    return SPOKEN + ord("a") + checksum(tokens) % 26


def crash(tokens: Sequence[int], prompt_len: int) -> int:
    """Count; but `poison 5` in a prompt kills the process at token 5, and `stall 5` makes it stand still there."""
    found = _HARM.search(bytes(token for token in tokens[:prompt_len] if token < BOS))
    if found and len(tokens) - prompt_len >= int(found["at"]):
        if found["harm"] == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    return count(tokens, prompt_len)


def checksum(tokens: Sequence[int]) -> int:
    """A number that depends on every token and its place."""
    return zlib.crc32(array("i", tokens))


def prompt_length(tokens: Sequence[int]) -> int:
    """Where the prompt of a sequence ends: at the first spoken token."""
    return next((i for i, token in enumerate(tokens) if token >= SPOKEN), len(tokens))


def _echo_source(tokens: Sequence[int], prompt_len: int) -> bytes:
    prompt = list(tokens[:prompt_len])
    if IM_END in prompt:
        end = prompt_len - 1 - prompt[::-1].index(IM_END)
        start = max((i for i in range(end) if prompt[i] == IM_START), default=-1)
        message = bytes(token for token in prompt[start + 1 : end] if token < BOS)
        return message.split(b"\n", 1)[-1]
    return bytes(token for token in prompt if token < BOS)


SCRIPTS: dict[str, Script] = {"echo": echo, "count": count, "babble": babble, "crash": crash}
