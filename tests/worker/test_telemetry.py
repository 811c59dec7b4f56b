from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.worker.engine_harness import Harness
from worker.telemetry import Metrics


def sample(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                return found.value
    raise AssertionError(f"{name} {labels} is not in the metrics")


def test_metrics_count_what_the_engine_signals() -> None:
    harness = Harness()
    metrics = Metrics("w1")
    metrics.connect(harness.engine)
    harness.submit("a", "four", max_tokens=3)
    harness.submit("b", "four", max_tokens=2, stream=True)
    harness.run()
    text = metrics.render()
    assert sample(text, "slotline_ticks_total", server="w1") == 3
    assert sample(text, "slotline_prefill_tokens_total") == 8
    assert sample(text, "slotline_decode_tokens_total") == 3
    assert sample(text, "slotline_generated_tokens_total") == 5
    assert sample(text, "slotline_requests_total", outcome="length", mode="stream") == 1
    assert sample(text, "slotline_eval_seconds_count") == 3
    metrics.show(active_slots=0, queue_depth=4)
    assert sample(metrics.render(), "slotline_active_slots") == 0
    assert sample(metrics.render(), "slotline_queue_depth") == 4


def test_metrics_of_two_engines_stay_apart() -> None:
    first, second = Harness(), Harness()
    metrics = Metrics("w1")
    metrics.connect(first.engine)
    second.submit("a")
    second.run()
    assert sample(metrics.render(), "slotline_ticks_total") == 0
