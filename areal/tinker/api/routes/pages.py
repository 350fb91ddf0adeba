"""Routes for people and for monitoring: the status page and the metrics."""

from __future__ import annotations

from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from areal.tinker.api.context import Context, ServiceDependency
from areal.tinker.api.metrics import MEDIA_TYPE
from areal.tinker.service.tenants.caller import SERVER

page_routes = APIRouter(tags=["monitoring"])

PAGE = resources.files("areal.tinker.api").joinpath("status.html").read_text(encoding="utf-8")
# Only the page's inline script and style run, and it talks to this server only.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'"


@page_routes.get("/", response_class=HTMLResponse)
async def status_page() -> HTMLResponse:
    """Show models, queue, losses and checkpoints."""
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})


@page_routes.get("/status")
async def status(service: ServiceDependency) -> dict[str, Any]:
    """Return what the status page shows, which is the caller's, or all to an administrator."""
    return await service.status()


@page_routes.get("/metrics")
async def metrics(request: Request, context: Context) -> Response:
    """Return the metrics in the format of Prometheus: numbers of the whole server, without names."""
    status = await context.service.for_caller(SERVER).status()
    return Response(request.app.state.metrics.text(status), media_type=MEDIA_TYPE)
