from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadLogits, GrammarDeadEnd, InvalidGrammar
from shared.settings import WorkerSettings, load
from worker.backend import BatchItem, DecodeOutcome, ModelError, SamplingParams
from worker.constraint import Literal, Many, json_object_constraint, json_schema_constraint, render
from worker.fake_backend import FakeBackend
from worker.fake_scripts import EOS, IM_END, N_TOKENS, FakeVocab

CHAT = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi\nyou<|im_end|>\n<|im_start|>assistant\n"


def answer(
    backend: FakeBackend, prompt: str | list[int], params: SamplingParams | None = None, most: int = 40, seq_id: int = 0
) -> str:
    """Generate alone in one sequence, from where its cache ends."""
    tokens = backend.vocab.tokenize(prompt, parse_special=True) if isinstance(prompt, str) else prompt
    sampler = backend.new_sampler(params or SamplingParams())
    text = b""
    for index in range(most):
        assert backend.decode([BatchItem(seq_id, len(backend.cache[seq_id]), tokens, True)]) is DecodeOutcome.DONE
        token = sampler.sample(0, index)
        if token is None or token in backend.vocab.eog:
            break
        text += backend.vocab.piece(token)
        tokens = [token]
    return text.decode()


def test_echo_repeats_the_prompt_and_ends() -> None:
    assert answer(FakeBackend(), "héllo 😀") == "héllo 😀"


def test_echo_of_a_chat_repeats_the_last_message() -> None:
    assert answer(FakeBackend(), CHAT) == "hi\nyou"


def test_echo_without_an_end_begins_again() -> None:
    assert answer(FakeBackend(), "abc", SamplingParams(ignore_eos=True), most=8) == "abcabcab"


def test_echo_of_nothing_ends_at_once() -> None:
    assert answer(FakeBackend(), "<|bos|>") == ""


def test_count_goes_on_without_end() -> None:
    assert answer(FakeBackend("count"), "x", most=30).startswith("1 2 3 4 5 6 7 8 9 10 11 12 ")


def test_a_script_may_be_a_function_of_the_sequence() -> None:
    backend = FakeBackend(lambda tokens, prompt_len: EOS if len(tokens) - prompt_len == 3 else 260 + prompt_len)
    assert answer(backend, "a" * 70) == "FFF"


@pytest.mark.parametrize("script", ["echo", "count", "babble"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=5)])
def test_an_interrupted_answer_goes_on_as_if_nothing_had_happened(script: str, params: SamplingParams) -> None:
    whole = FakeBackend(script)
    answer(whole, "hello world", params, most=9)
    tokens = whole.cache[0]
    resumed = FakeBackend(script)
    for split in (11, 12, 15):
        resumed.clear(1)
        resumed.decode([BatchItem(1, 0, tokens[:split], True)])
        assert resumed.new_sampler(params).sample(0, split - 11) == tokens[split]


def test_a_token_of_another_sequence_shows_as_wrong_text() -> None:
    backend = FakeBackend("babble")
    right = answer(backend, "hello", most=10)
    backend.decode([BatchItem(1, 0, [ord("!")], False)])
    assert answer(backend, "hello", most=10, seq_id=1) != right


def test_a_position_that_does_not_continue_the_cache_fails() -> None:
    backend = FakeBackend()
    backend.decode([BatchItem(0, 0, [1, 2], False)])
    with pytest.raises(AssertionError, match="holds 2 tokens"):
        backend.decode([BatchItem(0, 3, [3], False)])


@pytest.mark.parametrize(
    "items",
    [
        [],
        [BatchItem(0, 0, [], True)],
        [BatchItem(0, 0, [1] * 9, True)],
        [BatchItem(0, 0, [1] * 5, True), BatchItem(1, 0, [1] * 4, True)],
        [BatchItem(6, 0, [1], True)],
        [BatchItem(-1, 0, [1], True)],
    ],
)
def test_a_batch_beyond_the_limits_is_refused(items: list[BatchItem]) -> None:
    with pytest.raises(ValueError, match="batch|sequence"):
        FakeBackend(n_batch=8, n_parallel=4, cached_prefixes=2).decode(items)


@pytest.mark.parametrize(("unified", "fits"), [(True, 16), (False, 4)])
def test_a_full_cache_refuses_without_change(unified: bool, fits: int) -> None:
    backend = FakeBackend(n_ctx=16, n_parallel=4, kv_unified=unified)
    assert backend.decode([BatchItem(0, 0, [1] * fits, False)]) is DecodeOutcome.DONE
    assert backend.decode([BatchItem(0, fits, [1], True)]) is DecodeOutcome.NO_ROOM
    assert len(backend.cache[0]) == fits
    backend.cut(0, fits - 1)
    assert backend.decode([BatchItem(0, fits - 1, [1], True)]) is DecodeOutcome.DONE


def test_faults_are_injected_once_each() -> None:
    backend = FakeBackend(outcomes=[DecodeOutcome.NO_ROOM, DecodeOutcome.FAILED])
    item = BatchItem(0, 0, [1, 2, 3], True)
    assert backend.decode([item]) is DecodeOutcome.NO_ROOM
    assert backend.cache[0] == []
    assert backend.decode([item]) is DecodeOutcome.FAILED
    assert backend.cache[0] == [1, 2]
    backend.clear(0)
    assert backend.decode([item]) is DecodeOutcome.DONE
    assert list(backend.passes) == [(item,)]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_poisoned_row_is_bad_logits(value: float) -> None:
    backend = FakeBackend()
    backend.poison[1] = value
    backend.decode([BatchItem(0, 0, [65], True), BatchItem(1, 0, [65], True)])
    sampler = backend.new_sampler(SamplingParams(temperature=1.0))
    with pytest.raises(BadLogits):
        sampler.sample(1, 0)
    assert sampler.sample(0, 0) is not None


def test_a_model_that_cannot_cut_can_only_be_cleared() -> None:
    backend = FakeBackend(cannot_cut=True)
    backend.decode([BatchItem(0, 0, [1, 2, 3], False)])
    assert not backend.cut(0, 2)
    assert backend.cut(0, 3)
    assert len(backend.cache[0]) == 3
    assert backend.cut(0, 0)
    assert backend.cache[0] == []


def test_a_pass_waits_at_the_gate() -> None:
    backend = FakeBackend()
    backend.gate.clear()
    thread = threading.Thread(target=backend.decode, args=([BatchItem(0, 0, [1], False)],))
    thread.start()
    assert backend.cache[0] == []
    backend.gate.set()
    thread.join(timeout=5)
    assert backend.cache[0] == [1]


def test_rows_come_in_the_order_of_the_items_that_want_them() -> None:
    backend = FakeBackend()
    items = [BatchItem(2, 0, [70], True), BatchItem(0, 0, [71], False), BatchItem(1, 0, [72], True)]
    backend.decode(items)
    assert backend.logits().shape == (2, N_TOKENS)
    assert backend.logits().dtype == np.float32
    assert backend.logits().argmax(axis=1).tolist() == [260 + 70, 260 + 72]


def test_grammars_of_one_text() -> None:
    backend = FakeBackend()
    assert answer(backend, "hi", SamplingParams(grammar='root ::= "yes"', ignore_eos=True)) == "yes"
    backend.clear(0)
    with pytest.raises(GrammarDeadEnd):
        answer(backend, "hi", SamplingParams(grammar='root ::= "yes" []'))
    with pytest.raises(InvalidGrammar):
        backend.vocab.check_grammar("root ::= [a-z]", "root")
    with pytest.raises(InvalidGrammar):
        backend.vocab.check_grammar('root ::= "yes"', "other")


ORDER = {
    "type": "object",
    "properties": {
        "item": {"enum": ["tea", "cake"]},
        "count": {"type": "integer", "minimum": 12, "maximum": 40},
        "note": {"type": "string"},
        "parts": {
            "type": "array",
            "items": {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            "minItems": 2,
        },
    },
    "required": ["item", "count", "note", "parts"],
}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_constrained_answer_is_json_and_ends(temperature: float) -> None:
    for seed in range(5):
        params = SamplingParams(constraint=json_schema_constraint(ORDER, "p"), temperature=temperature, seed=seed)
        value = json.loads(answer(FakeBackend(), "hello", params, most=500))
        assert value["item"] in ("tea", "cake") and 12 <= value["count"] <= 40 and len(value["parts"]) >= 2
        assert isinstance(value["note"], str) and all("a" in part for part in value["parts"])


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": "array", "minItems": 3}, {"const": {"é": [None]}}])
def test_a_constraint_is_followed_whatever_it_is(schema: dict[str, Any]) -> None:
    text = answer(FakeBackend(), "hello", SamplingParams(constraint=json_schema_constraint(schema, "p")), most=200)
    assert text == text.strip()
    json.loads(text)


def test_the_script_speaks_where_a_constraint_lets_it() -> None:
    params = SamplingParams(constraint=json_schema_constraint({"type": "string"}, "p"))
    assert answer(FakeBackend("count"), "hi", params, most=12) == '" 2 3 4 5 6 '


def test_a_json_object_is_complete_when_it_closes() -> None:
    backend = FakeBackend()
    params = SamplingParams(constraint=json_object_constraint(), ignore_eos=True)
    assert answer(backend, "hi", params) == "{}"
    sampler = backend.new_sampler(params)
    sampler.accept(260 + ord("{"))
    assert not sampler.is_complete
    sampler.accept(260 + ord("}"))
    assert sampler.is_complete


def test_an_answer_that_may_go_on_may_also_end() -> None:
    params = SamplingParams(constraint=render(Many(Literal("ab"))))
    assert answer(FakeBackend(), "abab", params) == "abab"


def test_an_earlier_token_outside_the_constraint_is_a_dead_end() -> None:
    sampler = FakeBackend().new_sampler(SamplingParams(constraint=json_object_constraint()))
    for token in (260 + ord("x"), ord("{"), EOS):
        with pytest.raises(GrammarDeadEnd):
            sampler.accept(token)


def test_a_grammar_of_one_text_is_complete_at_its_end() -> None:
    sampler = FakeBackend().new_sampler(SamplingParams(grammar='root ::= "yes"'))
    states = []
    for letter in b"yes":
        states.append(sampler.is_complete)
        sampler.accept(260 + letter)
    assert [*states, sampler.is_complete] == [False, False, False, True]


def test_settings_choose_the_script_and_its_pace() -> None:
    backend = FakeBackend.from_settings(load(WorkerSettings, {"model_path": "fake:count:0.25", "n_parallel": 2}))
    assert backend.delay_s == 0.25
    assert (backend.info.n_parallel, backend.info.n_seq_max) == (2, 66)


def test_a_shared_prefix_takes_no_cells_and_outlives_its_donor() -> None:
    backend = FakeBackend()
    backend.decode([BatchItem(0, 0, [1, 2, 3, 4], False)])
    assert backend.share(0, 1, 3)
    assert (backend.cache[1], backend.used) == ([1, 2, 3], 4)
    backend.clear(0)
    assert (backend.cache[1], backend.used) == ([1, 2, 3], 3)
    backend.decode([BatchItem(1, 3, [9], False)])
    backend.cut(1, 1)
    assert backend.used == 1


def test_a_split_cache_copies_and_a_model_that_cannot_cut_shares_only_whole_sequences() -> None:
    split = FakeBackend(kv_unified=False)
    split.decode([BatchItem(0, 0, [1, 2, 3], False)])
    assert split.share(0, 1, 2) and split.used == 5
    recurrent = FakeBackend(cannot_cut=True)
    recurrent.decode([BatchItem(0, 0, [1, 2, 3], False)])
    assert not recurrent.share(0, 1, 2) and recurrent.cache[1] == []
    assert recurrent.share(0, 1, 3)


@pytest.mark.parametrize("path", ["fake:nonsense", "fake:echo:soon", "fake:"])
def test_an_unknown_script_is_a_model_error(path: str) -> None:
    with pytest.raises(ModelError):
        FakeBackend.from_settings(load(WorkerSettings, {"model_path": path, "name": "x"}))


def test_a_context_too_small_for_the_slots_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="n_ctx 64 is too small for 8 slots"):
        FakeBackend.from_settings(load(WorkerSettings, {"model_path": "fake:echo", "n_ctx": 64, "n_parallel": 8}))


@given(st.text())
def test_text_survives_the_vocabulary(text: str) -> None:
    vocab = FakeVocab()
    spells_control = any(control in text for control in vocab.control_texts())
    for parse_special in (False,) if spells_control else (True, False):
        tokens = vocab.tokenize(text, parse_special=parse_special)
        assert b"".join(map(vocab.piece, tokens)) == text.encode()


def test_control_tokens_are_parsed_only_where_asked() -> None:
    vocab = FakeVocab()
    assert vocab.tokenize("a<|im_end|>", parse_special=True) == [97, IM_END]
    assert IM_END not in vocab.tokenize("a<|im_end|>", parse_special=False)
    assert {vocab.token_text(token) for token in range(256, 260)} == vocab.control_texts()
