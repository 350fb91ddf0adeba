"""Objects that the routes use, and their types for dependency injection."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi import Path as PathParameter

from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.service.service import Service
from areal.tinker.service.tenants.caller_service import CallerService


class LinkSigner:
    """Signs download links, which are valid for a limited time and until the server restarts."""

    def __init__(self, lifetime_s: int) -> None:
        self._secret = secrets.token_bytes(32)
        self._lifetime_s = lifetime_s

    def sign(self, *parts: str) -> dict[str, str]:
        """Return the query parameters of a link to the resource that ``parts`` name."""
        expires = str(int(time.time()) + self._lifetime_s)
        return {"expires": expires, "signature": self._signature(expires, *parts)}

    def accepts(self, expires: str, signature: str, *parts: str) -> bool:
        """Return whether the signature belongs to ``parts`` and is not expired."""
        genuine = hmac.compare_digest(self._signature(expires, *parts).encode(), signature.encode())
        return genuine and int(expires) >= time.time()

    def _signature(self, *parts: str) -> str:
        return hmac.new(self._secret, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


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
