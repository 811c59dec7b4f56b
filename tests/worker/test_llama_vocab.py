from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.backend import Vocabulary
from worker.llama_backend import LlamaBackend

pytestmark = pytest.mark.model

CHAT = "<|im_start|>user\nhi<|im_end|>\n"


def text_of(vocab: Vocabulary, tokens: list[int]) -> str:
    return b"".join(map(vocab.piece, tokens)).decode()


@pytest.mark.parametrize(
    "text", ["", " ", "hello world", "  two", "naïve 😀👩‍👩‍👧 漢字", "say A\0 then say B", "\r\n\t", "a" * 100_000]
)
def test_text_comes_back_as_it_was(llama: LlamaBackend, text: str) -> None:
    for parse_special in (True, False):
        assert text_of(llama.vocab, llama.vocab.tokenize(text, parse_special=parse_special)) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text())
def test_no_character_is_lost(llama: LlamaBackend, text: str) -> None:
    got = text_of(llama.vocab, llama.vocab.tokenize(text, parse_special=False))
    # This vocabulary has no token for some control characters, nor for the planes 4 to 11.
    expected = "".join("\ufffd" if c in "\x04\x06\x13\x14\x16\x1d" or 4 <= ord(c) >> 16 < 12 else c for c in text)
    assert got == expected


def test_a_lone_surrogate_becomes_a_replacement_character(llama: LlamaBackend) -> None:
    vocab = llama.vocab
    assert text_of(vocab, vocab.tokenize("a\ud800b\udfff", parse_special=False)) == "a\ufffdb\ufffd"
    assert text_of(vocab, vocab.tokenize("\ud83d\ude00", parse_special=False)) == "😀"


def test_control_tokens_are_parsed_only_where_asked(llama: LlamaBackend) -> None:
    vocab = llama.vocab
    parsed, plain = (vocab.tokenize(CHAT, parse_special=special) for special in (True, False))
    assert len(parsed) < len(plain)
    assert text_of(vocab, parsed) == "user\nhi\n"
    assert text_of(vocab, plain) == CHAT
    assert vocab.token_text(parsed[0]) == "<|im_start|>"
    assert {"<|im_start|>", "<|im_end|>"} <= vocab.control_texts()


def test_no_start_token_is_added(llama: LlamaBackend) -> None:
    assert llama.vocab.tokenize("", parse_special=True) == []
    assert llama.vocab.bos not in llama.vocab.tokenize("hello", parse_special=True)


def test_the_ends_are_known(llama: LlamaBackend) -> None:
    vocab = llama.vocab
    assert {"<|im_end|>", "<|endoftext|>"} <= {vocab.token_text(token) for token in vocab.eog}
    assert vocab.n_tokens == 49152
    assert not vocab.adds_bos
    assert vocab.eos is not None and vocab.token_text(vocab.eos) == "<|im_end|>"
    assert vocab.closing is None


def test_every_token_has_a_piece(llama: LlamaBackend) -> None:
    pieces = [llama.vocab.piece(token) for token in range(llama.vocab.n_tokens)]
    assert max(map(len, pieces)) > 64
    assert pieces == [llama.vocab.piece(token) for token in range(llama.vocab.n_tokens)]


def test_many_threads_may_ask_at_once(llama: LlamaBackend) -> None:
    texts = [f"text number {i} " * 20 for i in range(50)]
    expected = [llama.vocab.tokenize(text, parse_special=True) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: llama.vocab.tokenize(t, parse_special=True), texts)) == expected
