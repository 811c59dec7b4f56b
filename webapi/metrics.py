"""What `GET /metrics` shows: this process's own figures, the queues, and what live workers report."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from shared.registry import WorkerStats

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The figures of one web process. Each process of a server has its own, told apart by `process`."""

    def __init__(self, open_streams: Callable[[], int]) -> None:
        self._own = CollectorRegistry()
        self._process = str(os.getpid())
        self._requests = Counter(
            "slotline_http_requests",
            "HTTP requests answered, by route and status.",
            ["process", "method", "route", "status"],
            registry=self._own,
        )
        streams = Gauge("slotline_open_streams", "Event streams open now.", ["process"], registry=self._own)
        streams.labels(self._process).set_function(open_streams)

    def count(self, method: str, route: str, status: int) -> None:
        """Count one answered request."""
        self._requests.labels(self._process, method, route, str(status)).inc()

    def render(self, workers: Sequence[WorkerStats], depths: Mapping[str, Mapping[str, int]], redis_up: bool) -> bytes:
        """Everything in Prometheus' text format; each name is described once, whoever reports it."""
        shown = CollectorRegistry()
        shown.register(_Now(workers, depths, redis_up))
        return generate_latest(self._own) + generate_latest(shown)


class _Now(Collector):
    """The part that is read anew for each scrape."""

    def __init__(self, workers: Sequence[WorkerStats], depths: Mapping[str, Mapping[str, int]], redis_up: bool) -> None:
        self.workers = workers
        self.depths = depths
        self.redis_up = redis_up

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("slotline_redis_up", "1 if Redis answered this scrape.", value=float(self.redis_up))
        queues = GaugeMetricFamily("slotline_waiting_jobs", "Jobs that wait, by queue.", labels=["model", "priority"])
        for model, by_priority in self.depths.items():
            for priority, depth in by_priority.items():
                queues.add_metric([model, priority], depth)
        yield queues
        yield from merge(self.workers)


def merge(workers: Sequence[WorkerStats]) -> list[Metric]:
    """The metrics of all workers, a family for each name, each sample labelled with model and worker (`server`)."""
    families: dict[str, Metric] = {}
    for stats in workers:
        for found in _parsed(stats):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                labels = {"model": stats.model, "server": stats.worker, **sample.labels}
                family.samples.append(sample._replace(labels=labels))
    return list(families.values())


def _parsed(stats: WorkerStats) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(stats.metrics))
    except ValueError:
        log.warning("the metrics of worker %s cannot be read", stats.worker)
        return []
