from __future__ import annotations

from typing import Any

import pytest

from shared.settings import WorkerSettings, load
from worker.backend import ModelError
from worker.sizing import MIB, Model, Place, Sizes, fit, given_sizes, scripted_sizes

#: What a model of 1.5 billion numbers takes: 28 layers, K and V, 2 heads of 128 numbers of 2 bytes.
PER_TOKEN = 28 * 2 * 2 * 128 * 2


def settings(**given: Any) -> WorkerSettings:
    return load(WorkerSettings, {"model_path": "m.gguf", "n_ctx": 0, "n_parallel": "auto"} | given)


def model(
    free_mib: float = 100_000, n_ctx_train: int = 32_768, most_slots: int = 16, spare: int = 64, **place: Any
) -> Model:
    needs = {"fixed": 300 * MIB, "per_token": PER_TOKEN, "per_sequence": MIB} | place
    return Model(n_ctx_train, [Place("GPU0", round(free_mib * MIB), **needs)], most_slots, spare)


@pytest.mark.parametrize(
    ("given", "found", "sizes"),
    [
        # With memory enough it is the model's own, in as many slots as are of use.
        ({}, model(), Sizes(32_768, 16)),
        ({}, model(n_ctx_train=1_048_576, most_slots=256), Sizes(1_048_576, 256)),
        # Of a small context there is more than the model's own, so that each slot has some.
        ({}, model(n_ctx_train=2048), Sizes(8192, 16)),
        ({"n_parallel": 7}, model(n_ctx_train=2048), Sizes(3584, 7)),
        ({}, model(n_ctx_train=100, most_slots=1), Sizes(512, 1)),
        # What is asked for stays.
        ({"n_parallel": 3}, model(), Sizes(32_768, 3)),
        ({"n_ctx": 4096}, model(), Sizes(4096, 8)),
        ({"n_ctx": 10_000}, model(free_mib=10), Sizes(10_000, 1)),
        ({"n_ctx": 300}, model(), Sizes(300, 1)),
        ({"n_ctx": 16_384}, model(most_slots=64), Sizes(16_384, 32)),
        ({"n_batch": 5}, model(), Sizes(32_768, 5)),
        # Memory for 16 slots and their prefixes, and 13,000 tokens.
        ({}, model(free_mib=300 + 80 + 13_000 * PER_TOKEN / MIB), Sizes(12_800, 16)),
        # For less than 512 tokens a slot there are fewer slots, whose rows leave room for a few tokens more.
        ({}, model(free_mib=300 + 80 + 4096 * PER_TOKEN / MIB), Sizes(4352, 8)),
        ({}, model(free_mib=300 + 65 + 300 * PER_TOKEN / MIB), Sizes(256, 1)),
        # States of 100 MiB for each sequence.
        ({}, model(free_mib=2000, spare=0, per_sequence=100 * MIB), Sizes(10_752, 14)),
        ({"n_ctx": 4096}, model(free_mib=1000, spare=0, per_sequence=100 * MIB), Sizes(4096, 7)),
        # A pass of embeddings, of which nothing is kept.
        ({"pooling": "mean"}, model(n_ctx_train=512, per_token=0, spare=0), Sizes(8192, 16)),
        ({"pooling": "mean", "n_parallel": 1}, model(n_ctx_train=512, per_token=0, spare=0), Sizes(2048, 1)),
    ],
)
def test_sizes_follow_from_need_and_memory(given: dict[str, Any], found: Model, sizes: Sizes) -> None:
    assert fit(settings(**given), found) == sizes


def test_the_fullest_of_several_devices_decides() -> None:
    places = [
        Place("GPU0", 8000 * MIB, 100 * MIB, PER_TOKEN / 2),
        Place("GPU1", 200 * MIB, 100 * MIB, PER_TOKEN / 2),
        Place("RAM", 8000 * MIB, 300 * MIB, 0, MIB),
    ]
    assert fit(settings(), Model(131_072, places, 16, 64)) == Sizes(7168, 14)


@pytest.mark.parametrize(
    ("given", "found", "message"),
    [
        (
            {},
            model(free_mib=200),
            "a context of 256 tokens takes 372 MiB beside the model, and GPU0 has 200 MiB to give; free some, "
            "use a smaller model, or lower n_parallel or n_ubatch",
        ),
        ({"n_parallel": 64}, model(free_mib=430), "a context of 2048 tokens takes 484 MiB beside the model"),
        ({"n_parallel": 16, "n_ctx": 256}, model(), "n_ctx 256 is too small for 16 slots; set it to 512 or more"),
        ({"n_ctx": 16}, model(), "n_ctx 16 is too small for 1 slots"),
    ],
)
def test_what_does_not_fit_is_told_with_both_numbers(given: dict[str, Any], found: Model, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        fit(settings(**given), found)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_there_are_no_more_sequences_than_llama_cpp_can_tell_apart() -> None:
    assert model(spare=64).sequences(200) == 256
    assert model(spare=64).sequences(4) == 68


def test_sizes_that_are_asked_for_need_no_look_at_the_model() -> None:
    assert given_sizes(settings(n_ctx=8192, n_parallel=4)) == Sizes(8192, 4)
    assert given_sizes(settings(n_ctx=8192)) is None
    assert given_sizes(settings(n_parallel=4)) is None


@pytest.mark.parametrize(
    ("given", "most_slots", "sizes"),
    [
        ({}, None, Sizes(8192, 4)),
        ({}, 64, Sizes(8192, 64)),
        ({"n_ctx": 512}, None, Sizes(512, 4)),
        ({"n_parallel": 9}, 64, Sizes(8192, 9)),
        ({"n_batch": 2}, None, Sizes(8192, 2)),
    ],
)
def test_the_scripted_model_has_sizes_of_its_own(given: dict[str, Any], most_slots: int | None, sizes: Sizes) -> None:
    assert scripted_sizes(settings(**given), most_slots) == sizes
