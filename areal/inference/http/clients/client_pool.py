"""Client processes of the owner of servers, and connections whose answers they fetch."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from areal.inference.http.clients.channel import Answered, Cancel, Channel, Healthy, Introduce, Ready, SendRequest
from areal.inference.http.server_connection import ClientLost, ServerConnection, StatusError, Unavailable
from areal.inference.http.servers.dialect import ReplyPart, Routes
from areal.inference.http.servers.http_call import HTTPCall, ReplyBody
from areal.inference.protocol import Sampling
from areal.inference.together import gather_or_cancel

logger = logging.getLogger(__name__)

_PROGRAM = """import sys
sys.path[:] = {path!r}
from areal.inference.http.clients.client_process import serve_owner
serve_owner({descriptor})
"""
_START_SECONDS = 120.0
"""Maximum seconds until a client process has imported what it needs."""
_END_SECONDS = 5.0
"""Seconds after which a client process that does not end is killed."""


class ClientPool:
    """Processes that send the requests for answers, and parse the replies. The owner keeps all state: servers, versions, updates, limits.

    A process that ends gets no more requests; those that it had are sent again by the others, or by the owner if none is left.
    All methods but the constructor run on the event loop of the servers.

    Args:
        count: number of processes; 0 sends from this process.

    Raises:
        ValueError: ``count`` is negative.
    """

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"client_processes = {count}: give at least 0; 0 sends requests from this process")
        self._count = count
        self._clients: list[ClientHandle] = []

    def connection(self, url: str, headers: Mapping[str, str]) -> ServerConnection:
        """Return a connection to a server, whose answers are fetched by the processes."""
        return PooledConnection(self, url, headers) if self._count else ServerConnection(url, headers)

    async def open(self) -> None:
        """Start the processes, and wait until they are ready.

        Raises:
            RuntimeError: a process ended, or is not ready in time.
        """
        for _ in range(self._count):
            client = ClientHandle()
            await client.start()
            self._clients.append(client)
        await gather_or_cancel(client.ready() for client in self._clients)

    def choose(self) -> ClientHandle | None:
        """Return the process with the fewest requests; ``None`` if all have ended."""
        return min((each for each in self._clients if not each.lost), key=lambda each: len(each.pending), default=None)

    async def close(self) -> None:
        """End the processes, and wait for their end."""
        await asyncio.gather(*(client.close() for client in self._clients))


class Outstanding(NamedTuple):
    """A request that a process has: its reply, and what to call meanwhile."""

    reply: asyncio.Future[ReplyPart]
    on_connect: Callable[[], None]
    on_life: Callable[[], None]


class ClientHandle:
    """One process, as the owner sees it. :meth:`start` comes first.

    Attributes:
        pending: its requests by number.
        lost: it has ended.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._routes: dict[str, Routes] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending: dict[int, Outstanding] = {}
        self.lost = self._closed = False

    async def start(self) -> None:
        """Start a process that finds the same modules."""
        here, there = socket.socketpair()
        with there:
            # Not forked: this process has threads.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path, descriptor=there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._channel = await Channel.over(here, self._take)
        self._watching = asyncio.create_task(self._watch())

    async def ready(self) -> None:
        """Wait until the process can take requests.

        Raises:
            RuntimeError: it ended, or needs too long.
        """
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(self._ready)  # cancelling this must not cancel what the watch waits for
        except TimeoutError as error:
            raise RuntimeError(
                f"client process {self._process.pid} was not ready within {_START_SECONDS:g} s"
            ) from error

    async def ask(
        self,
        connection: ServerConnection,
        routes: Routes,
        call: HTTPCall[ReplyBody],
        sampling: Sampling,
        seconds: float,
        on_connect: Callable[[], None],
        on_life: Callable[[], None],
    ) -> ReplyPart:
        """Let the process send a request; see :meth:`ServerConnection.generate`. Cancelling the task cancels it.

        Raises:
            ClientLost: the process ended.
            ValueError: the routes cannot be pickled.
        """
        url = connection.url
        if self._routes.get(url) is not routes:
            self._channel.send(Introduce(url, connection.headers, _pickled(routes)))
            self._routes[url] = routes
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self.pending[number] = Outstanding(reply, on_connect, on_life)
        self._channel.send(SendRequest(number, url, call, sampling, seconds))
        try:
            return await reply
        except asyncio.CancelledError:
            self._channel.send(Cancel(number))
            raise
        finally:
            del self.pending[number]

    async def _watch(self) -> None:
        """Fail the requests of the process when it ends."""
        await self._channel.ended
        self.lost = True
        status = await asyncio.to_thread(self._process.wait)
        error = ClientLost(f"client process {self._process.pid} ended with status {status}")
        if not self._closed:
            logger.warning("%s; its %d requests are sent again", error, len(self.pending))
        replies: list[asyncio.Future[Any]] = [self._ready, *(each.reply for each in self.pending.values())]
        for reply in replies:
            if not reply.done():
                reply.set_exception(error)
        self._ready.exception()  # retrieved, also if nobody waits

    def _take(self, message: Ready | Answered | Healthy) -> None:
        if isinstance(message, Ready):
            self._ready.set_result(None)
            return
        # The owner may have cancelled the request meanwhile.
        request = self.pending.get(message.number)
        if request is None or request.reply.done():
            return
        if isinstance(message, Healthy):
            request.on_life()
            return
        if message.connected:
            request.on_connect()
        if isinstance(message.result, Exception):
            request.reply.set_exception(message.result)
        else:
            request.reply.set_result(message.result)

    async def close(self) -> None:
        """End the process, and wait for its end."""
        self._closed = True
        self._channel.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.shield(self._watching)
        except TimeoutError:
            self._process.kill()
            await self._watching


def _pickled(routes: Routes) -> bytes:
    """Return the pickle of routes.

    Raises:
        ValueError: they cannot be pickled.
    """
    try:
        return pickle.dumps(routes)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"client_processes: {type(routes).__name__} cannot be sent to another process ({error}): define its functions in a module, "
            "or pass client_processes=0"
        ) from error


class PooledConnection(ServerConnection):
    """Connection to one server whose answers are fetched by client processes. All other requests are sent from here.

    Args:
        pool: the processes.
        url, headers: see :class:`ServerConnection`.
    """

    def __init__(self, pool: ClientPool, url: str, headers: Mapping[str, str]) -> None:
        super().__init__(url, headers)
        self._pool = pool

    async def generate(
        self,
        routes: Routes,
        call: HTTPCall[ReplyBody],
        sampling: Sampling,
        seconds: float,
        on_connect: Callable[[], None],
        on_life: Callable[[], None],
    ) -> ReplyPart:
        client = self._pool.choose()
        if client is None:
            return await super().generate(routes, call, sampling, seconds, on_connect, on_life)
        # Faults and replies that the process sees count as if they were seen here.
        try:
            reply = await client.ask(self, routes, call, sampling, seconds, on_connect, on_life)
        except (Unavailable, StatusError) as error:
            self.note(error.status)
            raise
        self.note(200)
        return reply
