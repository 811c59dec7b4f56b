"""The vocabulary of a model of llama.cpp."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

from worker.grammar import compile_grammar
from worker.llama_native import ll, quick, slow
from worker.matcher import ConstraintCompiler, Spelling
from worker.token_tree import TokenTree

# A long prompt takes tens of milliseconds.
_tokenize = slow("llama_tokenize")
_to_piece = quick("llama_token_to_piece")
_attributes = quick("llama_vocab_get_attr")
_sampler_free = quick("llama_sampler_free")

_CONTROL_ATTRS = ll.LLAMA_TOKEN_ATTR_CONTROL | ll.LLAMA_TOKEN_ATTR_UNKNOWN

_SPECIAL_ATTRS = _CONTROL_ATTRS | ll.LLAMA_TOKEN_ATTR_USER_DEFINED
#: Control tokens that are looked for in one call.
_FEW = 64

#: Characters that hold every byte UTF-8 can have.
_SAMPLES = [*map(chr, range(0x100)), *map(chr, range(0x100, 0x800, 0x40)), *map(chr, range(0x800, 0xD800, 0x800))]
_SAMPLES += [*map(chr, range(0xE000, 0x10000, 0x800)), *map(chr, range(0x10000, 0x110000, 0x8000))]


class LlamaVocab:
    """The `Vocabulary` of a loaded model; it must not be used after the model is freed.

    llama.cpp's vocabulary is not changed by any call, so every method may be called from any thread.

    Attributes:
        control: the control tokens, whose text is never part of an answer.
        constraints: the compiler of constraints.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.n_tokens = int(ll.llama_vocab_n_tokens(handle))
        self.bos: int | None = _token_or_none(ll.llama_vocab_bos(handle))
        self.adds_bos = bool(ll.llama_vocab_get_add_bos(handle))
        self.eos = _token_or_none(ll.llama_vocab_eos(handle))
        self.closing = _closing(handle)
        is_eog = quick("llama_vocab_is_eog")
        self.eog = frozenset(token for token in range(self.n_tokens) if is_eog(handle, token))
        self._pieces: list[bytes | None] = [None] * self.n_tokens
        self.control = frozenset(token for token in range(self.n_tokens) if self._is_control(token))
        self._control_texts = frozenset(map(self.token_text, self.control))
        self.constraints = ConstraintCompiler(self._spelling)
        self._cut = self._cut_marks()
        self._missing = b""
        self._missing = self._missing_bytes()

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """See `Vocabulary`. A lone surrogate, which has no UTF-8, becomes U+FFFD.

        So does a character the vocabulary has no bytes for; llama.cpp would drop it in silence.
        """
        data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        if self._missing and len(data.translate(None, self._missing)) < len(data):
            data = "".join(map(self._sayable, data.decode())).encode()
        if not parse_special:
            return self._tokens(data, parse_special)
        return [token for stretch in stretches(data, self._cut) for token in self._tokens(stretch, parse_special)]

    def _tokens(self, data: bytes, parse_special: bool) -> list[int]:
        room = len(data) + 2
        tokens = (ll.llama_token * room)()
        count = _tokenize(self.handle, data, len(data), tokens, room, False, parse_special)
        if count < 0:
            tokens = (ll.llama_token * -count)()
            count = _tokenize(self.handle, data, len(data), tokens, -count, False, parse_special)
        return tokens[:count]  # type: ignore[no-any-return]

    def piece(self, token: int) -> bytes:
        """See `Vocabulary`."""
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = b"" if token in self.control else self._spell(token)
        return piece

    def token_text(self, token: int) -> str:
        """See `Vocabulary`."""
        return self._spell(token).decode(errors="replace")

    def control_texts(self) -> frozenset[str]:
        """See `Vocabulary`."""
        return self._control_texts

    def check_grammar(self, grammar: str, root: str) -> None:
        """See `Vocabulary`."""
        _sampler_free(compile_grammar(self, grammar, root).sampler)
        # So that it is there when the engine thread needs it: to spell all tokens and sort them takes 0.4 s.
        assert self.tree is not None

    def check_constraint(self, constraint: str) -> None:
        """See `Vocabulary`."""
        self.constraints.compile(constraint)

    @cached_property
    def tree(self) -> TokenTree:
        """The tokens that are text: all but control tokens and those that end an answer."""
        return TokenTree([b"" if token in self.eog else self.piece(token) for token in range(self.n_tokens)])

    def _spelling(self) -> Spelling:
        special = self.control | self.eog
        return Spelling([self.piece(t) or self._spell(t) for t in range(self.n_tokens)], special, self.eog)

    def _spell(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        size = _to_piece(self.handle, token, buffer, 64, 0, True)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = _to_piece(self.handle, token, buffer, -size, 0, True)
        return buffer.raw[:size]

    def _missing_bytes(self) -> bytes:
        """The bytes of UTF-8 that a vocabulary made of bytes has no token for."""
        if ll.llama_vocab_type(self.handle) != ll.LLAMA_VOCAB_TYPE_BPE:
            return b""
        said = {byte for token in self.tokenize("".join(_SAMPLES), parse_special=False) for byte in self.piece(token)}
        return bytes(set("".join(_SAMPLES).encode()) - said)

    def _sayable(self, character: str) -> str:
        return "\ufffd" if set(character.encode()) & set(self._missing) else character

    def _cut_marks(self) -> re.Pattern[bytes]:
        """What `stretches` cuts behind: control tokens that leave the blanks after them alone."""
        special = {t: _attributes(self.handle, t) & _SPECIAL_ATTRS for t in range(self.n_tokens)}
        texts = {t: self._spell(t) for t, attributes in special.items() if attributes}
        cutting = [texts[t] for t in self.control if not _attributes(self.handle, t) & ll.LLAMA_TOKEN_ATTR_RSTRIP]
        return cut_marks(cutting, texts.values())

    def _is_control(self, token: int) -> bool:
        return bool(_attributes(self.handle, token) & _CONTROL_ATTRS)


def cut_marks(cutting: Iterable[bytes], special: Iterable[bytes]) -> re.Pattern[bytes]:
    """Those of the texts `cutting` that share no byte with another special token wherever they stand."""
    texts = set(special)
    begins = {text[:size] for text in texts for size in range(1, len(text))}
    ends = {text[size:] for text in texts for size in range(1, len(text))}
    all_texts = b"\0".join(texts)

    def stands_alone(text: bytes) -> bool:
        inner = range(1, len(text))
        overlaps = any(text[size:] in begins or text[size:] in texts or text[:size] in ends for size in inner)
        return not overlaps and all_texts.count(text) == 1 and not any(text[:size] in texts for size in inner)

    return re.compile(b"|".join(re.escape(text) for text in sorted(set(cutting)) if stands_alone(text)) or b"(?!)")


def stretches(data: bytes, cut: re.Pattern[bytes]) -> Iterator[bytes]:
    """A text in pieces of few control tokens each, whose tokens are those of the whole.

    llama.cpp takes time by the square of their number: 140 s for 100,000 of them, 7 s in pieces.
    """
    start = 0
    for found in islice(cut.finditer(data), _FEW - 1, None, _FEW):
        yield data[start : found.end()]
        start = found.end()
    if start < len(data):
        yield data[start:]


def _closing(handle: Any) -> int | None:
    if ll.llama_vocab_get_add_sep(handle):
        return _token_or_none(ll.llama_vocab_sep(handle))
    return _token_or_none(ll.llama_vocab_eos(handle)) if ll.llama_vocab_get_add_eos(handle) else None


def _token_or_none(token: int) -> int | None:
    return int(token) if token >= 0 else None
