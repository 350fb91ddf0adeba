"""Outermost middleware: counts requests, and answers unexpected errors without their internals."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.tinker.api.error_replies import error_response
from areal.tinker.api.metrics import ServerMetrics

logger = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware that gives each request an id, which the header ``X-Request-ID`` of the answer and the log name."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = uuid.uuid4().hex[:16]
        status = 0  # of no answer: the client has disconnected

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        start = time.perf_counter()
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            # The path, without the query: a link's signature is not logged.
            logger.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if status:
                raise
            response = error_response(500, f"Internal error; the server's log has it under {request_id}.")
            await response(scope, receive, send_with_id)
        finally:
            self.metrics.in_flight.dec()
            # The pattern of the route, not the path: each series of a metric stays in memory.
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.answered(route, status, time.perf_counter() - start)
