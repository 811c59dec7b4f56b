from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.backend import SamplingParams, draw_seed
from worker.token_choice import PENALTY_WINDOW_TOKENS, TokenChooser, _top_k

SIZE = 500


def row_of(seed: int, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, SIZE).astype(np.float32)


def shares(params: SamplingParams, row: npt.NDArray[np.float32], draws: int = 4000) -> dict[int, float]:
    chooser = TokenChooser(params)
    counts = Counter(chooser.choose(chooser.adjust(row), index) for index in range(draws))
    return {token: count / draws for token, count in counts.items()}


def native_shares(params: SamplingParams, row: npt.NDArray[np.float32]) -> dict[int, float]:
    """The probabilities by llama.cpp's own chain."""
    ll = pytest.importorskip("worker.llama_native").ll
    chain = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
    samplers: list[Any] = []
    if params.top_k > 0:
        samplers.append(ll.llama_sampler_init_top_k(params.top_k))
    samplers.append(ll.llama_sampler_init_top_p(params.top_p, 1))
    samplers.append(ll.llama_sampler_init_min_p(params.min_p, 1))
    samplers.append(ll.llama_sampler_init_temp(params.temperature))
    samplers.append(ll.llama_sampler_init_dist(0))
    for sampler in samplers:
        ll.llama_sampler_chain_add(chain, sampler)
    data = (ll.llama_token_data * len(row))(*[(i, float(x), 0.0) for i, x in enumerate(row)])
    array = ll.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
    ll.llama_sampler_apply(chain, ctypes.byref(array))
    ll.llama_sampler_free(chain)
    return {array.data[i].id: array.data[i].p for i in range(array.size)}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=2.0, top_k=0, top_p=0.9, min_p=0.0),
        SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=7, top_p=1.0, min_p=0.0),
        SamplingParams(temperature=0.5, top_k=1000, top_p=0.99, min_p=0.01),
    ],
)
def test_tokens_come_as_often_as_from_llama_cpp(params: SamplingParams) -> None:
    for seed in range(3):
        row = row_of(seed)
        expected, got = native_shares(params, row), shares(params, row)
        assert set(got) <= set(expected)
        for token, share in expected.items():
            assert got.get(token, 0.0) == pytest.approx(share, abs=0.03)


@given(st.integers(0, 2**63 - 1), st.integers(0, 100_000))
def test_a_draw_depends_on_seed_and_index_alone(seed: int, index: int) -> None:
    params = SamplingParams(temperature=1.0, top_k=20, seed=seed)
    fresh, used = TokenChooser(params), TokenChooser(params)
    for i in range(3):
        used.choose(row_of(i), i)
        used.accept(i)
    row = row_of(index % 17)
    assert fresh.choose(row, index) == used.choose(row, index)


@given(st.integers(0, 1000), st.integers(1, 1100), st.integers(1, 5000))
def test_the_most_likely_tokens_are_found_without_sorting_all(seed: int, k: int, size: int) -> None:
    row = np.random.default_rng(seed).integers(-40, 40, size).astype(np.float32)
    ids, logits = _top_k(row, k, 1.0)
    expected = np.argsort(-row, kind="stable")[:k]
    assert ids.tolist() == expected.tolist()
    assert logits.tolist() == row[expected].tolist()


def test_seeds_differ_over_their_whole_range() -> None:
    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1]
    assert len({draw_seed(seed, index) for seed in seeds for index in range(1000)}) == 6000
    row = np.zeros(SIZE, np.float32)
    texts = {
        tuple(TokenChooser(SamplingParams(temperature=1.0, top_k=0, seed=seed)).choose(row, i) for i in range(8))
        for seed in seeds
    }
    assert len(texts) == len(seeds)


@pytest.mark.parametrize("top_k", [0, 1, 5, SIZE, 10 * SIZE])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 0.7, 10.0])
def test_what_is_forbidden_is_never_chosen(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.full(SIZE, -np.inf, np.float32)
    row[[3, 5]] = [1.0, 0.5]
    chooser = TokenChooser(params, forbidden={3})
    assert {chooser.choose(chooser.adjust(row), index) for index in range(50)} == {5}


def test_equal_logits_are_taken_in_the_order_of_their_ids() -> None:
    row = np.zeros(SIZE, np.float32)
    params = SamplingParams(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    assert set(shares(params, row, draws=200)) == {0, 1, 2, 3}
    assert TokenChooser(SamplingParams()).choose(row, 0) == 0


def test_bias_is_added_and_adds_up() -> None:
    row = np.zeros(SIZE, np.float32)
    chooser = TokenChooser(SamplingParams(logit_bias=((7, 2.0), (7, 2.0), (8, 3.0), (9, -100.0))))
    adjusted = chooser.adjust(row)
    assert adjusted[[7, 8, 9]].tolist() == [4.0, 3.0, -100.0]
    assert not row.any()
    assert chooser.choose(adjusted, 0) == 7


def test_penalties_follow_llama_cpp() -> None:
    row = np.array([2.0, -2.0, 1.0], np.float32)
    params = SamplingParams(repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    chooser = TokenChooser(params)
    for token in (0, 1, 1):
        chooser.accept(token)
    assert chooser.adjust(row).tolist() == [2.0 / 2 - 0.25 - 0.5, -2.0 * 2 - 2 * 0.25 - 0.5, 1.0]


def test_penalties_forget_what_is_long_past() -> None:
    chooser = TokenChooser(SamplingParams(presence_penalty=1.0))
    for token in [0] + [1] * PENALTY_WINDOW_TOKENS:
        chooser.accept(token)
    assert chooser.adjust(np.zeros(3, np.float32)).tolist() == [0.0, -1.0, 0.0]


def test_a_row_that_nothing_changes_is_not_copied() -> None:
    row = row_of(1)
    assert TokenChooser(SamplingParams(temperature=1.0)).adjust(row) is row


@given(
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.7, 2.0]),
    st.integers(0, 30),
    st.sampled_from([0.3, 0.95, 1.0]),
    st.sampled_from([0.0, 0.1]),
)
def test_only_the_most_likely_tokens_that_it_considers_matter(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    chooser = TokenChooser(SamplingParams(temperature, top_k, top_p, min_p, seed))
    row = np.random.default_rng(seed).normal(0, 2, 3000).astype(np.float32)
    count = chooser.considers
    assert (count is None) == (temperature > 0 and top_k == 0)
    if count is not None:
        cut = np.full_like(row, -np.inf)
        best = np.argsort(-row, kind="stable")[:count]
        cut[best] = row[best]
        assert chooser.choose(cut, 7) == chooser.choose(row, 7)
