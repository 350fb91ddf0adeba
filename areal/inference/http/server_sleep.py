"""Sleep of one server: its device memory is freed, and taken back."""

from __future__ import annotations

import contextlib
import time

from areal.inference.http.server import Server
from areal.inference.http.server_state import Lost


async def sleep_server(server: Server, seconds: float) -> str:
    """Pause a server and free its device memory. Returns the error, after which the server runs on, or an empty string."""
    try:
        routes = await server.known_routes(time.monotonic() + seconds)
        if routes.sleeps is None:
            raise ValueError(f"{server.url}: servers of this kind cannot sleep")
        await server.connection.send(routes.pauses.interrupt, seconds)
        await server.connection.send(routes.sleeps.sleep, seconds)
    except (RuntimeError, ValueError) as error:
        if server.routes is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                await server.connection.send(server.routes.pauses.resume, seconds)
        return str(error)
    return ""


async def wake_server(server: Server, seconds: float) -> str:
    """Take the device memory back, and resume. Returns the error, after which the weights are unknown, or an empty string."""
    try:
        routes = await server.known_routes(time.monotonic() + seconds)
        if routes.sleeps is None:
            return ""
        for call in (routes.sleeps.wake, routes.pauses.resume):
            await server.connection.insist(call, time.monotonic() + seconds)
    except (RuntimeError, ValueError) as error:
        server.enter(Lost(f"{server.url} did not wake up"))
        return str(error)
    if not routes.sleeps.keeps_weights:
        server.enter(Lost(f"{server.url} has slept without a backup of its weights: send an update"))
    return ""
