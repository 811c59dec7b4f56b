"""What sequences share and what is cut off them, on a real model and on small ones of each kind of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shared.settings import WorkerSettings, load
from tests.worker.tiny_models import WINDOW, write_tiny_model
from worker.backend import BatchItem, DecodeOutcome, Logits
from worker.llama_backend import LlamaBackend

pytestmark = pytest.mark.model

#: How far logits of Q8_0 move with the make-up of a batch.
TOLERANCE = 1.5
#: The small models are computed in float32, with states and keys of half the precision.
SMALL_TOLERANCE = 0.05

STORY = (
    "Once upon a time there was a lighthouse keeper who talked to the gulls every morning before the ships came in. "
)
ENDS = ["One day the gulls", "The keeper's lamp was", "Every ship that passed", "At night he"]

Tiny = Callable[..., LlamaBackend]


def compute(backend: LlamaBackend, seq_id: int, tokens: list[int], position: int = 0) -> Logits:
    assert backend.decode([BatchItem(seq_id, position, tokens, True)]) is DecodeOutcome.DONE
    return backend.logits()[0].copy()


def alone(backend: LlamaBackend, tokens: list[int], seq_id: int = 3) -> Logits:
    backend.clear(seq_id)
    row = compute(backend, seq_id, tokens)
    backend.clear(seq_id)
    return row


@pytest.fixture(scope="module")
def apart(open_llama: Callable[..., LlamaBackend]) -> LlamaBackend:
    return open_llama(n_ctx=2048, n_parallel=4, kv_unified="off")


@pytest.fixture(params=["unified", "apart"])
def either(request: pytest.FixtureRequest, llama: LlamaBackend, apart: LlamaBackend) -> LlamaBackend:
    """The demo model with sequences in one buffer, and in one each."""
    backend = llama if request.param == "unified" else apart
    for seq_id in range(backend.info.n_seq_max):
        backend.clear(seq_id)
    return backend


def texts(backend: LlamaBackend, ends: list[str] = ENDS) -> tuple[list[int], list[list[int]]]:
    def tokens(text: str) -> list[int]:
        return backend.vocab.tokenize(text, parse_special=False)

    return tokens(STORY * 2), [tokens(f" {end}") for end in ends]


def test_a_shared_prefix_goes_on_as_one_computed_alone(either: LlamaBackend) -> None:
    prefix, (first, second, *_) = texts(either)
    wanted = [alone(either, prefix + end) for end in (first, second)]
    compute(either, 0, prefix + first)
    assert either.share(0, 1, len(prefix))
    row = compute(either, 1, second, len(prefix))
    assert np.abs(row - wanted[1]).max() < TOLERANCE
    assert row.argmax() == wanted[1].argmax()
    assert np.abs(wanted[0] - wanted[1]).max() > 2 * TOLERANCE
    # The source is as it was.
    row = compute(either, 0, second, len(prefix + first))
    assert np.abs(row - alone(either, prefix + first + second)).max() < TOLERANCE


def test_a_shared_prefix_outlives_the_sequence_it_came_from(either: LlamaBackend) -> None:
    prefix, (first, second, *_) = texts(either)
    wanted = alone(either, prefix + second)
    compute(either, 0, prefix + first)
    assert either.share(0, 1, len(prefix))
    either.clear(0)
    compute(either, 0, first * 8)  # takes what cells there are
    assert np.abs(compute(either, 1, second, len(prefix)) - wanted).max() < TOLERANCE


def test_a_source_may_be_in_the_middle_of_its_prompt(either: LlamaBackend) -> None:
    prefix, (first, second, *_) = texts(either)
    wanted = [alone(either, prefix + end) for end in (first, second)]
    half = len(prefix) // 2
    either.decode([BatchItem(0, 0, prefix[:half], False)])
    assert either.share(0, 1, half)
    # Both go on in one pass.
    items = [BatchItem(0, half, prefix[half:] + first, True), BatchItem(1, half, prefix[half:] + second, True)]
    assert either.decode(items) is DecodeOutcome.DONE
    for row, expected in zip(either.logits(), wanted, strict=True):
        assert np.abs(row - expected).max() < TOLERANCE


def test_what_was_shared_can_be_shared_again(either: LlamaBackend) -> None:
    prefix, (first, second, third, _) = texts(either)
    compute(either, 0, prefix + first)
    assert either.share(0, 1, len(prefix))
    assert either.share(1, 2, len(prefix) - 5)
    either.clear(0)
    either.clear(1)
    row = compute(either, 2, prefix[-5:] + third, len(prefix) - 5)
    assert np.abs(row - alone(either, prefix + third)).max() < TOLERANCE


def test_cutting_one_of_two_leaves_the_other_whole(either: LlamaBackend) -> None:
    prefix, (first, second, *_) = texts(either)
    compute(either, 0, prefix)
    assert either.share(0, 1, len(prefix))
    assert either.cut(1, 10)
    row = compute(either, 0, first, len(prefix))
    assert np.abs(row - alone(either, prefix + first)).max() < TOLERANCE
    row = compute(either, 1, second, 10)
    assert np.abs(row - alone(either, prefix[:10] + second)).max() < TOLERANCE


def test_shared_cells_are_there_once(open_llama: Callable[..., LlamaBackend]) -> None:
    small = open_llama(n_ctx=256, n_parallel=4)
    tokens = texts(small)[0] * 5
    compute(small, 0, tokens[:200])
    for target in (1, 2, 3):
        assert small.share(0, target, 200)
    items = [BatchItem(seq_id, 200, tokens[:14], True) for seq_id in range(4)]
    assert small.decode(items) is DecodeOutcome.DONE
    assert small.decode([BatchItem(0, 214, [5], True)]) is DecodeOutcome.NO_ROOM
    for seq_id in range(4):
        small.clear(seq_id)


@pytest.mark.parametrize("length", [0, -1, 5])
def test_more_than_a_sequence_has_cannot_be_shared(llama: LlamaBackend, length: int) -> None:
    compute(llama, 0, [5, 6, 7, 8])
    with pytest.raises(ValueError, match=f"{length} tokens of sequence 0"):
        llama.share(0, 1, length)
    with pytest.raises(ValueError, match="sequence 0 for 0"):
        llama.share(0, 0, 4)


def test_sequences_for_prefixes_are_had_only_where_they_can_be_shared(
    open_llama: Callable[..., LlamaBackend], tiny: Tiny
) -> None:
    def count(backend: LlamaBackend) -> tuple[int, int, bool]:
        return backend.info.n_seq_max, backend.info.n_parallel, backend.info.kv_unified

    assert count(open_llama(n_parallel=3, cached_prefixes=5)) == (8, 3, True)
    assert count(open_llama(n_parallel=250, n_ctx=8192, cached_prefixes=64)) == (256, 250, True)
    assert count(open_llama(n_parallel=3, kv_unified="off")) == (3, 3, False)
    assert count(tiny("gemma2")) == (68, 4, True)
    assert count(tiny("mamba")) == (4, 4, True)
    assert count(tiny("jamba")) == (4, 4, True)


def test_more_sequences_than_a_pass_has_tokens_are_no_trouble(open_llama: Callable[..., LlamaBackend]) -> None:
    backend = open_llama(n_ctx=512, n_parallel=2, n_batch=8, cached_prefixes=64)
    assert backend.info.n_seq_max > backend.info.n_batch
    assert backend.decode([BatchItem(i, 0, [5, 6], True) for i in range(4)]) is DecodeOutcome.DONE


def test_more_rows_than_llama_cpp_has_room_for_are_refused(open_llama: Callable[..., LlamaBackend]) -> None:
    backend = open_llama(n_ctx=512, n_parallel=2, cached_prefixes=0)
    with pytest.raises(ValueError, match="3 rows of logits, where 2 are possible"):
        backend.decode([BatchItem(i % 2, i // 2, [5], True) for i in range(3)])
    assert backend.decode([BatchItem(i, 0, [5], True) for i in range(2)]) is DecodeOutcome.DONE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """Loads a small model of some kind of memory."""
    folder = tmp_path_factory.mktemp("tiny")
    opened: list[LlamaBackend] = []

    def open_(kind: str, **given: object) -> LlamaBackend:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            write_tiny_model(path, kind)
        defaults = {"model_path": str(path), "n_ctx": 512, "n_parallel": 4}
        opened.append(LlamaBackend(load(WorkerSettings, defaults | given)))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(5, 50, count).tolist()


def close(row: Logits, wanted: Logits) -> bool:
    return bool(np.abs(row - wanted).max() < SMALL_TOLERANCE)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_state_is_shared_whole_or_not_at_all(tiny: Tiny, kind: str, unified: bool) -> None:
    backend = tiny(kind, kv_unified="on" if unified else "off")
    tokens, more = some_tokens(40), some_tokens(6, 2)
    wanted = alone(backend, tokens + more)
    compute(backend, 0, tokens)
    assert not backend.share(0, 1, 39)
    assert backend.share(0, 2, 40)
    # Each goes on by itself.
    compute(backend, 0, some_tokens(9, 3), 40)
    assert close(compute(backend, 2, more, 40), wanted)
    # What was refused has changed nothing: sequence 1 is empty.
    assert close(compute(backend, 1, tokens + more), wanted)


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_shared_state_outlives_its_source(tiny: Tiny, kind: str) -> None:
    backend = tiny(kind)
    tokens, more = some_tokens(40), some_tokens(6, 2)
    wanted = alone(backend, tokens + more)
    compute(backend, 0, tokens)
    assert backend.share(0, 2, 40)
    backend.clear(0)
    compute(backend, 0, some_tokens(50, 3))
    assert close(compute(backend, 2, more, 40), wanted)


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_state_cannot_be_cut(tiny: Tiny, kind: str) -> None:
    backend = tiny(kind)
    tokens, more = some_tokens(40), some_tokens(6, 2)
    wanted = alone(backend, tokens + more)
    compute(backend, 0, tokens)
    assert not backend.cut(0, 20)
    assert backend.cut(0, 40)  # there is nothing to remove
    assert close(compute(backend, 0, more, 40), wanted)
    assert backend.cut(0, 0)
    assert close(compute(backend, 0, tokens + more), wanted)


@pytest.mark.parametrize("unified", [True, False])
def test_a_window_is_shared_and_cut_as_long_as_it_is_whole(tiny: Tiny, unified: bool) -> None:
    backend = tiny("gemma2", kv_unified="on" if unified else "off")
    tokens, more = some_tokens(80), some_tokens(6, 2)
    wanted = alone(backend, tokens[:50] + more)
    compute(backend, 0, tokens)
    assert backend.share(0, 1, 50)
    assert close(compute(backend, 1, more, 50), wanted)
    assert backend.cut(0, 50)
    assert close(compute(backend, 0, more, 50), wanted)


def forget(backend: LlamaBackend, tokens: list[int]) -> int:
    """Compute sequence 0 so that llama.cpp takes cells outside its window; its first position that is left."""
    size = len(tokens) // 2
    compute(backend, 1, some_tokens(size - 30, 5))
    compute(backend, 0, tokens[:size])
    backend.clear(1)
    # It fills the cells that became free and goes on with those of its own beginning, though others are free.
    compute(backend, 0, tokens[size:], size)
    first = backend._memory._first(backend._memory._memory, 0)
    return int(first)


@pytest.mark.parametrize("how", ["share", "cut"])
def test_a_window_that_is_not_whole_any_more_is_neither_shared_nor_cut(tiny: Tiny, how: str) -> None:
    # Another one for comparison: whatever is computed in the first takes more of its cells.
    backend, other = tiny("gemma2"), tiny("gemma2")
    tokens = some_tokens(300)
    lost = forget(backend, tokens)
    assert lost == 30

    def reuse(length: int) -> bool:
        return backend.share(0, 1, length) if how == "share" else backend.cut(0, length)

    # The token at this position looks at one that is gone; the next one does not.
    too_early = lost + WINDOW - 2
    assert not reuse(too_early)
    assert reuse(too_early + 1)
    row = compute(backend, 1 if how == "share" else 0, [9], too_early + 1)
    assert close(row, alone(other, [*tokens[: too_early + 1], 9]))


def test_what_is_taken_out_goes_on_elsewhere_exactly_as_in_its_place(apart: LlamaBackend) -> None:
    prefix, (first, second, *_) = texts(apart)
    for seq_id in range(4):
        apart.clear(seq_id)
    compute(apart, 1, prefix + first)
    state = apart.take(1)
    in_place = compute(apart, 1, second, len(prefix + first))
    for seq_id in (3, 1):  # another place, and its own after something else was there
        apart.clear(seq_id)
        assert apart.put(seq_id, state)
        assert np.array_equal(compute(apart, seq_id, second, len(prefix + first)), in_place)


def test_what_is_put_in_can_be_cut_to_a_prefix(apart: LlamaBackend) -> None:
    prefix, (first, second, *_) = texts(apart)
    wanted = alone(apart, prefix + second)
    apart.clear(0)
    compute(apart, 0, prefix + first)
    state = apart.take(0)
    apart.clear(2)
    assert apart.put(2, state)
    assert apart.cut(2, len(prefix))
    assert np.abs(compute(apart, 2, second, len(prefix)) - wanted).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_state_can_be_taken_out_and_put_in(tiny: Tiny, kind: str) -> None:
    backend = tiny(kind, kv_unified="off")
    tokens, more = some_tokens(40), some_tokens(6, 2)
    compute(backend, 0, tokens)
    state = backend.take(0)
    wanted = compute(backend, 0, more, 40)
    assert backend.info.can_move
    assert backend.put(2, state)
    assert np.array_equal(compute(backend, 2, more, 40), wanted)


def test_nothing_is_taken_out_of_a_window_which_would_be_all_that_is_left_of_it(tiny: Tiny) -> None:
    assert not tiny("gemma2", kv_unified="off").info.can_move
