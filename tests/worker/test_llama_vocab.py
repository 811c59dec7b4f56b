from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.backend import Vocabulary
from worker.llama_backend import LlamaBackend
from worker.llama_vocab import cut_marks, stretches

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", " ", "\n", "user", "é", "1"]), max_size=20
    )
)
def test_many_control_tokens_are_looked_for_in_pieces_and_found_as_in_one(
    llama: LlamaBackend, parts: list[str]
) -> None:
    text = "".join(parts) * 40
    whole = llama.vocab._tokens(text.encode(), True) if text else []
    assert llama.vocab.tokenize(text, parse_special=True) == whole


def test_a_long_chat_takes_no_call_with_many_control_tokens(
    llama: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    tokens = llama.vocab._tokens

    def counting(data: bytes, parse_special: bool) -> list[int]:
        sizes.append(data.count(b"<|im_"))
        return tokens(data, parse_special)

    monkeypatch.setattr(llama.vocab, "_tokens", counting)
    llama.vocab.tokenize(CHAT * 1000, parse_special=True)
    assert sum(sizes) == 2000 and max(sizes) <= 64


@pytest.mark.parametrize(
    ("special", "cutting"),
    [
        (["<a>", "<b>"], {"<a>", "<b>"}),
        (["<a>", "<a><b>"], set()),
        (["<a>", "x<a>y"], {"x<a>y"}),
        (["<a>", ">x"], set()),
        (["<a>", ">"], set()),
        (["aba"], set()),
        ([], set()),
    ],
)
def test_a_text_is_cut_behind_tokens_that_share_nothing_with_others(special: list[str], cutting: set[str]) -> None:
    pattern = cut_marks([s.encode() for s in special], [s.encode() for s in special])
    assert {s for s in special if pattern.fullmatch(s.encode())} == cutting
    assert b"".join(stretches("".join(special * 200).encode(), pattern)) == "".join(special * 200).encode()
