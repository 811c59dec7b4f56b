"""For those who watch: is the process there, can it do its work, and its figures."""

from __future__ import annotations

from typing import Literal

from flask import Response, jsonify
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from redis.exceptions import RedisError

from shared.errors import NoWorker
from shared.schemas import Strict
from webapi.describe import blueprint
from webapi.services import services
from webapi.stats import queue_depths

bp = blueprint("health", "operation")

METRICS = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}


class Health(Strict):
    """The process answers."""

    status: Literal["ok"]


class Readiness(Strict):
    """Jobs sent now are taken."""

    status: Literal["ready"]
    workers: int
    last_tick_age_s: float


@bp.get("/healthz", summary="Is the web process there", responses={200: Health})
def healthz() -> Response:
    """Always 200; asks nobody else."""
    return jsonify({"status": "ok"})


@bp.get("/readyz", summary="Can jobs be served", responses={200: Readiness})
def readyz() -> Response:
    """503 with the code `redis_unavailable` or `no_worker` says what is missing. Jobs are accepted without a worker.

    `last_tick_age_s` is that of the worker whose engine moved last.
    """
    workers = [stats for stats in services().registry.workers() if not stats.draining]
    if not workers:
        raise NoWorker("no worker is live; jobs are accepted and wait for one")
    age_s = min(stats.last_tick_age_s for stats in workers)
    return jsonify({"status": "ready", "workers": len(workers), "last_tick_age_s": age_s})


@bp.get("/metrics", summary="Figures for Prometheus", responses={200: METRICS})
def metrics() -> Response:
    """This process's figures, the queues and what live workers report; without Redis, the first alone."""
    given = services()
    try:
        workers, depths, redis_up = given.registry.workers(), queue_depths(given), True
    except RedisError:
        workers, depths, redis_up = [], {}, False
    body = given.metrics.render(workers, depths, redis_up)
    return Response(body, content_type=CONTENT_TYPE_PLAIN_0_0_4)
