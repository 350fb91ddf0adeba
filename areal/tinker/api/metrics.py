"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 60.0)
MEDIA_TYPE = CONTENT_TYPE_LATEST


class _Status(Collector):
    """The last status of the service as metrics. Series of models that were released are not there."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield a metric for each number of the status."""
        status = self.status
        gauges = {
            "areal_healthy": ("1 while the engine can train and sample", float(bool(status.get("healthy")))),
            "areal_sessions": ("Active sessions", status.get("sessions", 0)),
            "areal_models": ("Models with an adapter in memory", len(status.get("models", ()))),
            "areal_checkpoints": ("Stored checkpoints", status.get("checkpoint_count", 0)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        queue = GaugeMetricFamily("areal_queue_requests", "Requests that wait or run, by kind", labels=["kind"])
        for kind, number in status.get("queue", {}).items():
            queue.add_metric([kind], number)
        yield queue
        executed = CounterMetricFamily("areal_requests", "Requests with a result", labels=["kind", "result"])
        for entry in status.get("requests", ()):
            executed.add_metric([entry["kind"], entry["result"]], entry["count"])
        yield executed
        spent = CounterMetricFamily("areal_backend_seconds", "Time in the backends", labels=["kind"])
        for kind, seconds in status.get("seconds", {}).items():
            spent.add_metric([kind], seconds)
        yield spent
        tokens = CounterMetricFamily(
            "areal_tokens", "Tokens of training passes, and of sampled answers", labels=["kind"]
        )
        for kind, number in status.get("tokens", {}).items():
            tokens.add_metric([kind], number)
        yield tokens
        memory = GaugeMetricFamily(
            "areal_memory_bytes", "Memory that the server's process uses, and that is free", labels=["state"]
        )
        for state, nbytes in status.get("memory", {}).items():
            memory.add_metric([state], nbytes or 0)
        yield memory


class ServerMetrics:
    """Metrics of one application, in a separate registry: two applications of one process do not share counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter("areal_http_requests", "Answered requests", ["route", "status"], **shared)
        self._seconds = Histogram(
            "areal_http_request_seconds", "Time of a request", ["route"], buckets=SECONDS, **shared
        )
        self.in_flight = Gauge("areal_http_requests_in_flight", "Requests that are not answered yet", **shared)
        self._status = _Status()
        self._registry.register(self._status)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, status: dict[str, Any]) -> bytes:
        """Return all metrics, with the given state of the service."""
        self._status.status = status
        return generate_latest(self._registry)
