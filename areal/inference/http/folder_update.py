"""Update of one server from a folder, and the return of a server that was away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from areal.inference.http.server import Server
from areal.inference.http.server_connection import Unavailable
from areal.inference.http.server_state import Away, Lost, Outdated, ServerWeights, Serving, UpdateTimes, Updating


async def update_server(server: Server, weights: ServerWeights, times: UpdateTimes) -> str:
    """Pause a server, load weights and resume. Returns the error, or an empty string.

    A failed load may leave a server without weights, which would end it at the next request. The version before is loaded again.

    Args:
        server: the server.
        weights: weights in a folder.
        times: time limits.
    """
    async with server.turn:
        fault = ""
        try:
            await server.pause(times)
            await _replace(server, weights, times)
        except (RuntimeError, ValueError) as error:
            fault = str(error) if server.url in str(error) else f"{server.url}: {error}"
            if isinstance(error, Unavailable) and error.status is None:
                # It is gone, and gets the current weights when it is back.
                server.enter(Away(None, fault))
                return fault
            if server.version is None and server.loaded is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await _replace(server, server.loaded, times)
        return await server.resume(fault, times)


async def _replace(server: Server, weights: ServerWeights, times: UpdateTimes) -> None:
    """Load weights on a paused server. Their version is unknown until it confirms: it may have loaded some of them."""
    unknown = server.version is None
    why = f"{server.url} was told to load version {weights.version}, and did not say that it has"
    server.enter(Updating(Lost(why)))
    await server.load(weights, times.step, again=unknown)
    server.enter(Updating(Serving(weights.version)))


async def restore_server(
    server: Server, desired: Callable[[], ServerWeights | None], seconds: float, times: UpdateTimes
) -> None:
    """Bring back a server that was away or started anew, as soon as it answers. It gets requests from then on.

    Args:
        server: the server.
        desired: returns the weights of the last update; ``None`` before the first.
        seconds: time limit of the first contact.
        times: time limits of a load.

    Raises:
        Unavailable: it does not answer yet.
        RuntimeError, ValueError: it cannot load the weights, or they are unknown.
    """
    async with server.turn:
        # An update has brought it back meanwhile.
        if not isinstance(server.state, Away | Outdated):
            return
        version = await server.meet_again(seconds)
        while True:
            wanted = desired()
            try:
                version = await _catch_up(server, version, wanted, times)
                # It was paused for the load, or when it was lost.
                await server.end_pause(times.step)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, Unavailable) or desired() == wanted:
                    raise
            # An update of the others may have ended meanwhile.
            if desired() == wanted and version is not None:
                server.enter(Serving(version))
                return


async def _catch_up(server: Server, version: int | None, wanted: ServerWeights | None, times: UpdateTimes) -> int:
    """Load the wanted weights on a server that has another version, which is paused then. Returns the version that it has then."""
    if wanted is None:
        return await server.label_start() if version is None else version
    if wanted.version != version:
        if server.version is not None:
            # A load that breaks off leaves weights of no version.
            server.enter(Away(None, server.why))
        try:
            await _interrupt(server, times.step)
            await server.load(wanted, times.step, again=True)
        except (RuntimeError, ValueError) as error:
            # The owner after this one may take it as a server that was just started. One that is gone is met again.
            if not isinstance(error, Unavailable) or error.status is not None:
                with contextlib.suppress(RuntimeError, ValueError):
                    await server.end_pause(times.drain)
            raise
    return wanted.version


async def _interrupt(server: Server, seconds: float) -> None:
    """Pause a server, and discard requests that it got before its weights were known to be others: no token of theirs may count."""
    deadline = time.monotonic() + seconds
    routes = await server.known_routes(deadline)
    await server.connection.insist(routes.pauses.interrupt, deadline)
    await server.requests.discard()
