"""A process that sends requests of the owner of servers, until the owner ends."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket

from areal.inference.http.clients.channel import Answered, Cancel, Channel, Healthy, Introduce, Ready, SendRequest
from areal.inference.http.server_connection import ServerConnection, StatusError, Unavailable
from areal.inference.http.servers.dialect import Routes


class Client:
    """Sends requests and parses their replies. It decides nothing: errors go to the owner, which sends requests again.

    Call :meth:`serve` once.
    """

    def __init__(self) -> None:
        self._connections: dict[str, ServerConnection] = {}
        self._pickles: dict[str, bytes] = {}
        self._routes: dict[str, Routes] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, connected: socket.socket) -> None:
        """Serve the owner at the other end of a socket, to its end."""
        self._channel = await Channel.over(connected, self._take)
        self._channel.send(Ready())
        await self._channel.ended

    def _take(self, message: Introduce | SendRequest | Cancel) -> None:
        match message:
            case Introduce(url, headers, routes):
                self._connections.setdefault(url, ServerConnection(url, headers))
                self._pickles[url] = routes
                self._routes.pop(url, None)
            case SendRequest(number):
                self._running[number] = asyncio.create_task(self._answer(message))
            case Cancel(number):
                # The connection closes, and the server aborts the request.
                if number in self._running:
                    self._running[number].cancel()

    async def _answer(self, ask: SendRequest) -> None:
        """Send a request, and send its reply or error to the owner."""
        connected = False

        def note_connection() -> None:
            nonlocal connected
            connected = True

        result: object
        try:
            result = await self._connections[ask.url].generate(
                self._known_routes(ask.url),
                ask.call,
                ask.sampling,
                ask.seconds,
                note_connection,
                lambda: self._channel.send(Healthy(ask.number)),
            )
        except (Unavailable, StatusError) as error:
            result = error
        except Exception as error:
            # Other errors may not be picklable.
            result = RuntimeError(str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")
        finally:
            del self._running[ask.number]
        self._channel.send(Answered(ask.number, result, connected))

    def _known_routes(self, url: str) -> Routes:
        """Return the routes of a server. Unpickled here, so that an error is that of the request."""
        if url not in self._routes:
            self._routes[url] = pickle.loads(self._pickles[url])
        return self._routes[url]


def serve_owner(descriptor: int) -> None:
    """Serve the owner at the other end of the socket with this descriptor, to its end."""
    # An interruption from the terminal is the owner's, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(Client().serve(socket.socket(fileno=descriptor)))
