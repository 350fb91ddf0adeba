"""Prometheus metrics of the server."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 60.0)
MEDIA_TYPE = CONTENT_TYPE_LATEST


class ServerMetrics:
    """Metrics of one application, in a registry of their own: two applications of one process do not share counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self._registry}
        self._requests = Counter("areal_http_requests", "Answered requests", ["route", "status"], **shared)
        self._seconds = Histogram(
            "areal_http_request_seconds", "Time of a request", ["route"], buckets=SECONDS, **shared
        )
        self.in_flight = Gauge("areal_http_requests_in_flight", "Requests that are not answered yet", **shared)
        self._healthy = Gauge("areal_healthy", "1 while the engine can train and sample", **shared)
        self._sessions = Gauge("areal_sessions", "Active sessions", **shared)
        self._models = Gauge("areal_models", "Models with an adapter in memory", **shared)
        self._checkpoints = Gauge("areal_checkpoints", "Stored checkpoints", **shared)
        self._queue = Gauge("areal_queue_requests", "Requests that wait or run, by kind", ["kind"], **shared)
        self._steps = Gauge("areal_model_steps", "Optimizer steps of a model", ["model_id"], **shared)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, status: dict[str, Any]) -> bytes:
        """Return all metrics, with the current state of the service."""
        self._healthy.set(bool(status.get("healthy")))
        self._sessions.set(status.get("sessions", 0))
        self._checkpoints.set(len(status.get("checkpoints", ())))
        for kind, number in status.get("queue", {}).items():
            self._queue.labels(kind).set(number)
        # A model that was released leaves no series behind.
        self._steps.clear()
        models = status.get("models", ())
        self._models.set(len(models))
        for model in models:
            self._steps.labels(model["model_id"]).set(model.get("steps") or 0)
        return generate_latest(self._registry)
