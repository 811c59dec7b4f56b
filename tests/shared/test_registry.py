from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import redis

from shared.errors import UnknownModel
from shared.jobs import JobStore
from shared.registry import STATS_TTL_S, ModelCard, Registry, WorkerStats, stats_dict
from tests.shared.world import until


@pytest.fixture
def registry(client: redis.Redis) -> Registry:
    return Registry(client)


def card(name: str, alias: str = "", n_ctx: int = 64) -> ModelCard:
    return ModelCard(name, alias, n_ctx, n_vocab=100, max_request_tokens=64, has_chat_template=True, max_queue=3,
                     description="é 🦙")  # fmt: skip


def stats(worker: str, model: str = "m") -> WorkerStats:
    return WorkerStats(worker, model, n_parallel=4, n_batch=64, n_ctx=64, active_slots=1, metrics="# x")


@pytest.fixture
def live(registry: Registry, store: JobStore) -> list[str]:
    """Two workers of model `b`, by name."""
    for name in ("w2", "w1"):
        store.renew_lease(name, 100)
        registry.report(stats(name, "b"))
    return ["w1", "w2"]


# --- cards ---


def test_a_card_is_read_as_it_was_registered(registry: Registry) -> None:
    registry.register_model(card("org/m-1.2", alias="m"))
    assert registry.models() == [card("org/m-1.2", alias="m")]


def test_models_come_in_the_order_of_their_first_registration(registry: Registry) -> None:
    for name in ("c", "a", "b", "c"):
        registry.register_model(card(name))
    assert [c.name for c in registry.models()] == ["c", "a", "b"]


def test_a_model_registered_again_keeps_its_place_and_has_its_new_card(registry: Registry) -> None:
    for name, n_ctx in (("a", 64), ("b", 64), ("a", 128)):
        registry.register_model(card(name, n_ctx=n_ctx))
    assert [(c.name, c.n_ctx) for c in registry.models()] == [("a", 128), ("b", 64)]


def test_a_card_outlives_its_workers(registry: Registry, client: redis.Redis) -> None:
    registry.register_model(card("a"))
    assert client.ttl("slotline:model:a") == -1
    assert registry.resolve("a") == card("a")


def test_there_are_no_models_before_the_first(registry: Registry) -> None:
    assert registry.models() == []


# --- resolve ---


@pytest.mark.parametrize("name", [None, "default"])
def test_before_the_first_model_the_default_is_not_known_yet(name: str | None, registry: Registry) -> None:
    assert registry.resolve(name) is None


@pytest.mark.parametrize("name", [None, "default"])
def test_the_default_is_the_only_model(name: str | None, registry: Registry) -> None:
    registry.register_model(card("a"))
    assert registry.resolve(name) == card("a")


def test_the_default_is_the_first_model_where_none_is_live(registry: Registry) -> None:
    for name in ("b", "a"):
        registry.register_model(card(name))
    assert registry.resolve(None) == card("b")


def test_the_default_is_the_first_live_model(registry: Registry, live: list[str]) -> None:
    for name in ("a", "b", "c"):
        registry.register_model(card(name))
    assert registry.resolve(None) == card("b")
    for name in live:
        registry.forget(name)
    assert registry.resolve(None) == card("a")


def test_a_model_is_found_by_name_and_by_alias_live_or_not(registry: Registry) -> None:
    registry.register_model(card("a", alias="first"))
    registry.register_model(card("b", alias="second"))
    assert registry.resolve("b") == registry.resolve("second") == card("b", alias="second")


@pytest.mark.parametrize("name", ["x", "A", "a ", "first ", "a,b", ""])
def test_an_unknown_model_is_refused_with_the_names_there_are(name: str, registry: Registry) -> None:
    registry.register_model(card("a", alias="first"))
    registry.register_model(card("b"))
    with pytest.raises(UnknownModel, match="a, b$") as caught:
        registry.resolve(name)
    assert repr(name) in str(caught.value)
    assert caught.value.param == "model"


def test_an_unknown_model_is_refused_where_there_are_none(registry: Registry) -> None:
    with pytest.raises(UnknownModel, match="none yet"):
        registry.resolve("x")


def test_a_very_long_name_is_cut_in_the_error(registry: Registry) -> None:
    with pytest.raises(UnknownModel) as caught:
        registry.resolve("x" * 100_000)
    assert len(str(caught.value)) < 300


# --- workers ---


def test_models_and_workers_are_read_in_one_round_trip(registry: Registry, live: list[str], sent: list[Any]) -> None:
    registry.register_model(card("b"))
    registry.known()  # the script is there
    sent.clear()
    known = registry.known()
    assert ([c.name for c in known.models], [w.worker for w in known.workers]) == (["b"], live)
    assert known.is_live("b") and not known.is_live("a")
    assert len(sent) == 1


def test_live_workers_are_listed_by_name_with_their_figures(registry: Registry, live: list[str]) -> None:
    found = registry.workers()
    assert [w.worker for w in found] == live
    assert found[0] == replace(stats("w1", "b"), started_at=found[0].started_at)


def test_figures_run_out_when_they_are_not_renewed(registry: Registry, live: list[str], client: redis.Redis) -> None:
    assert 0 < client.pttl("slotline:stats:w1") <= STATS_TTL_S * 1000
    client.pexpire("slotline:stats:w1", 1)
    until(lambda: [w.worker for w in registry.workers()] == ["w2"])


def test_new_figures_take_the_place_of_the_old(registry: Registry, live: list[str]) -> None:
    registry.report(replace(stats("w1", "b"), active_slots=3))
    assert [w.active_slots for w in registry.workers()] == [3, 1]


def test_a_worker_that_signs_off_is_gone_at_once(registry: Registry, live: list[str]) -> None:
    registry.forget("w1")
    assert [w.worker for w in registry.workers()] == ["w2"]


def test_without_workers_there_are_no_figures(registry: Registry) -> None:
    assert registry.workers() == []


def test_shown_figures_are_all_but_the_metrics_text() -> None:
    shown = stats_dict(stats("w1"))
    assert set(shown) == {f.name for f in fields(WorkerStats)} - {"metrics"}
    documented = {"active_slots", "idle_slots", "prefilling_slots", "queue_depth", "n_parallel", "n_batch"}
    assert documented <= set(shown)
    assert shown == {k: v for k, v in asdict(stats("w1")).items() if k in shown} | {"started_at": shown["started_at"]}


# --- what is known already ---


def test_what_was_read_within_the_time_given_is_recent(registry: Registry) -> None:
    assert registry.recent(60) is None
    registry.register_model(card("a"))
    known = registry.known()
    registry.register_model(card("b"))
    assert registry.recent(60) is known
    assert [c.name for c in known.models] == ["a"]
    assert registry.recent(-1) is None
