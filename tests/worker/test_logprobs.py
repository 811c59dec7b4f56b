from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shared.results import TokenLogprob
from tests.worker.engine_harness import Harness, alone
from worker.backend import BatchItem, DecodeOutcome, Logits, SamplingParams, Vocabulary
from worker.fake_scripts import EOS, N_TOKENS, SPOKEN, FakeVocab
from worker.llama_backend import LlamaBackend
from worker.logprobs import RowLogprobs, from_json, to_json
from worker.requests import Likely, Logprob

VOCAB: Vocabulary = FakeVocab()
HOT = SamplingParams(temperature=0.8, seed=42)


def row_of(**logits: float) -> Logits:
    """A row that is 0 but for spoken letters."""
    row = np.zeros(N_TOKENS, np.float32)
    for letter, logit in logits.items():
        row[SPOKEN + ord(letter)] = logit
    return row


def test_a_logprob_is_the_natural_logarithm_of_the_probability() -> None:
    found = RowLogprobs(row_of(a=10, b=9), 2).of(SPOKEN + ord("b"), VOCAB)
    total = math.exp(10) + math.exp(9) + N_TOKENS - 2
    assert found.chosen.logprob == pytest.approx(9 - math.log(total), abs=1e-5)
    assert [(t.piece, pytest.approx(t.logprob, abs=1e-5)) for t in found.top] == [
        (b"a", 10 - math.log(total)),
        (b"b", 9 - math.log(total)),
    ]


@given(arrays(np.float32, 50, elements=st.floats(-1e4, 1e4, width=32)), st.integers(0, 60))
def test_the_most_likely_come_in_order_and_their_probabilities_add_up_to_one_at_most(row: Logits, top: int) -> None:
    found = RowLogprobs(row, top).of(int(row.argmax()), VOCAB)
    values = [t.logprob for t in found.top]
    assert values == sorted(values, reverse=True)
    assert len(values) == min(top, 50)
    assert sum(map(math.exp, values)) <= 1 + 1e-4
    assert not values or values[0] == found.chosen.logprob


def test_none_of_the_most_likely_are_given_where_none_are_asked_for() -> None:
    assert RowLogprobs(row_of(a=10), 0).of(SPOKEN + ord("a"), VOCAB).top == ()


def test_what_a_sampler_masks_afterwards_changes_nothing() -> None:
    row = row_of(a=10, b=9)
    read = RowLogprobs(row, 2)
    row[:] = -np.inf
    assert read.of(SPOKEN + ord("a"), VOCAB).chosen.logprob == pytest.approx(-0.330, abs=0.001)


def test_impossible_tokens_are_not_among_the_likely_ones_and_are_valid_json() -> None:
    row = np.full(N_TOKENS, -np.inf, np.float32)
    row[[SPOKEN + ord("a"), SPOKEN + ord("b")]] = 1, 2
    found = RowLogprobs(row, 5).of(SPOKEN, VOCAB)
    assert [t.piece for t in found.top] == [b"b", b"a"]
    assert json.loads(json.dumps(to_json(found), allow_nan=False))["logprob"] == -9999.0


def test_part_of_a_character_shows_its_true_bytes() -> None:
    data = to_json(RowLogprobs(row_of(), 0).of(SPOKEN + 0xF0, VOCAB))
    assert (data["token"], data["bytes"]) == ("\ufffd", [0xF0])


def test_a_control_token_is_spelt() -> None:
    data = to_json(RowLogprobs(row_of(), 0).of(EOS, VOCAB))
    assert (data["token"], bytes(data["bytes"])) == ("<|eos|>", b"<|eos|>")


def test_what_goes_through_the_log_comes_back_the_same() -> None:
    found = Logprob(Likely(b"\xf0", -0.5), (Likely(b"\xf0", -0.5), Likely(b"x", -1.25)))
    data = json.loads(json.dumps(to_json(found)))
    TokenLogprob.model_validate(data)
    assert from_json(data) == found


# --- through the engine ---


def test_only_a_request_that_asks_gets_them() -> None:
    harness = Harness()
    harness.submit("asks", logprobs=3)
    harness.submit("plain")
    harness.run()
    asked = harness.tokens("asks")
    assert all(t.logprob is not None and len(t.logprob.top) == 3 for t in asked)
    assert harness.ended("asks").logprobs == tuple(t.logprob for t in asked)
    assert all(t.logprob is None for t in harness.tokens("plain")) and harness.ended("plain").logprobs is None


def test_asking_changes_no_text() -> None:
    for params in (SamplingParams(), HOT):
        assert alone("a", params=params, logprobs=5).text("a") == alone("a", params=params).text("a")


def test_bias_temperature_and_a_forbidden_end_leave_them_as_the_model_made_them() -> None:
    plain = alone("a", "abc", script="echo", logprobs=2, max_tokens=3).ended("a").logprobs
    assert plain is not None
    ends = SamplingParams(ignore_eos=True, temperature=0.001, logit_bias=((EOS, -50.0),), seed=1)
    for params in (ends, SamplingParams(ignore_eos=True)):
        biased = alone("a", "abc", script="echo", logprobs=2, max_tokens=4, params=params).ended("a").logprobs
        assert biased is not None and biased[:3] == plain
        # Where the model would have ended, the end is the most likely one, and what was chosen instead the second.
        assert biased[3].top[0].piece == b"<|eos|>" and biased[3].chosen == biased[3].top[1]


def test_a_resumed_request_ends_with_those_of_all_its_tokens() -> None:
    whole = alone("a", params=HOT, logprobs=2, max_tokens=9)
    tokens, logprobs = [t.token for t in whole.tokens("a")], whole.ended("a").logprobs
    assert logprobs is not None
    for cut in range(10):
        harness = Harness()
        generated = tuple(t for t in tokens[:cut] if t is not None)
        harness.submit("a", params=HOT, logprobs=2, max_tokens=9, generated=generated, logged_logprobs=logprobs[:cut])
        harness.run()
        assert harness.ended("a").logprobs == logprobs


def test_a_request_that_had_to_pause_ends_with_those_of_all_its_tokens() -> None:
    harness = Harness()
    for name in "ab":
        harness.submit(name, logprobs=1, max_tokens=12)
    harness.tick(5)
    harness.backend.outcomes.append(DecodeOutcome.NO_ROOM)
    harness.run()
    for name in "ab":
        assert harness.ended(name).logprobs == alone(name, logprobs=1, max_tokens=12).ended(name).logprobs


@pytest.mark.model
def test_those_of_a_real_model_agree_with_its_row(llama: LlamaBackend) -> None:
    tokens = llama.vocab.tokenize("The capital of France is", parse_special=False)
    llama.decode([BatchItem(0, 0, tokens, True)])
    row = llama.logits()[0].astype(np.float64)
    expected = row - row.max() - math.log(np.exp(row - row.max()).sum())
    found = RowLogprobs(llama.logits()[0], 20).of(int(row.argmax()), llama.vocab)
    assert found.chosen.piece == b" Paris"
    assert [t.logprob for t in found.top] == pytest.approx(sorted(expected, reverse=True)[:20], abs=1e-4)
