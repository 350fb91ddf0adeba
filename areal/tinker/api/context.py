"""Objects that the routes use, and their types for dependency injection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi import Path as PathParameter

from areal.tinker.api.auth import LinkSigner
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.service.service import Service
from areal.tinker.service.tenants.caller_service import CallerService


@dataclass
class ApiContext:
    """Objects that all routes use. ``stopping`` is set when the server begins to shut down: held requests are answered then."""

    service: Service
    settings: ApiSettings
    links: LinkSigner
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


# Coroutines: a plain function would take a detour through a thread for each request.
async def _context(request: Request) -> ApiContext:
    return request.app.state.context


def service_of(request: Request) -> CallerService:
    """Return the service as the caller of a request may use it."""
    return request.app.state.context.service.for_caller(request.state.caller)


async def _service(request: Request) -> CallerService:
    return service_of(request)


Context = Annotated[ApiContext, Depends(_context)]
ServiceDependency = Annotated[CallerService, Depends(_service)]
Identifier = Annotated[str, PathParameter(max_length=1024, pattern=r"^[^\x00]+$")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**63)]
