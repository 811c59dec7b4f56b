"""`GET /v1/stats`: what the workers are doing and what waits for them."""

from __future__ import annotations

from typing import Any, get_type_hints

from flask import Response, jsonify
from pydantic import BaseModel, create_model

from shared.names import DEFAULT_MODEL, PRIORITIES, live_queues_key, rq_queue_key, split_queue_name
from shared.registry import WorkerStats, stats_dict
from shared.schemas import Strict
from webapi.describe import blueprint
from webapi.services import Services, services

bp = blueprint("stats", "operation")

#: The figures of one worker, field for field those of `WorkerStats`, save the rendered metrics.
FIGURES: Any = {name: (kind, ...) for name, kind in get_type_hints(WorkerStats).items() if name != "metrics"}
WorkerFigures: type[BaseModel] = create_model(
    "WorkerFigures",
    __doc__="One live worker. `last_tick_age_s` is the time since its engine last moved, idle or not.",
    **FIGURES,
)


class ModelQueues(Strict):
    """Jobs waiting for a model."""

    model: str
    queue_depth: int
    by_priority: dict[str, int]


class Stats(Strict):
    """The state of everything that is live now."""

    workers: list[WorkerFigures]
    models: list[ModelQueues]
    streams: int


@bp.get("/v1/stats", summary="Show what is going on", responses={200: Stats})
def stats() -> Response:
    """Figures of every live worker, waiting jobs of every model, and the open streams of this web process."""
    given = services()
    queues = [
        {"model": model, "queue_depth": sum(depths.values()), "by_priority": depths}
        for model, depths in queue_depths(given).items()
    ]
    workers = [stats_dict(worker) for worker in given.registry.workers()]
    return jsonify({"workers": workers, "models": queues, "streams": given.hub.open_streams})


def queue_depths(services: Services) -> dict[str, dict[str, int]]:
    """Waiting jobs by model and priority. Jobs that came before any worker wait under `default`."""
    models = [card.name for card in services.registry.models()]
    pipe = services.client.pipeline(transaction=False)
    for model in [*models, DEFAULT_MODEL]:
        pipe.smembers(live_queues_key(model))
    queues = dict(zip([*models, DEFAULT_MODEL], pipe.execute(), strict=True))
    if not queues[DEFAULT_MODEL]:
        del queues[DEFAULT_MODEL]
    depths: dict[str, dict[str, int]] = {model: dict.fromkeys(PRIORITIES, 0) for model in queues}
    found = [(model, name.decode()) for model, names in queues.items() for name in names]
    for _, name in found:
        pipe.llen(rq_queue_key(name))
    for (model, name), depth in zip(found, pipe.execute(), strict=True):
        depths[model][split_queue_name(name)[1]] += depth
    return depths
