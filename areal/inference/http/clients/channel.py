"""Messages between the owner of servers and a client process, over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from areal.inference.http.servers.dialect import ReplyPart
from areal.inference.http.servers.http_call import HTTPCall
from areal.inference.protocol import Sampling

_HEAD_BYTES = 8
"""Size of the length before each pickle."""
_BATCH_SECONDS = 0.005
"""Seconds for which messages are collected: each batch costs both sides about as much as three messages."""


class Ready(NamedTuple):
    """The client process can take requests."""


class Introduce(NamedTuple):
    """A server, before its first request and whenever it was examined anew.

    Attributes:
        url: base URL.
        headers: headers of each request.
        routes: pickle of its :class:`~areal.inference.http.servers.dialect.Routes`.
    """

    url: str
    headers: Mapping[str, str]
    routes: bytes


class SendRequest(NamedTuple):
    """A request for an answer; see :meth:`~areal.inference.http.server_connection.ServerConnection.generate`."""

    number: int
    url: str
    call: HTTPCall[Any]
    sampling: Sampling
    seconds: float


class Cancel(NamedTuple):
    """The reply to a request is not needed any more."""

    number: int


class Healthy(NamedTuple):
    """The server of a request without a reply has told that it is healthy."""

    number: int


class Answered(NamedTuple):
    """The end of a request.

    Attributes:
        number: number of the request.
        result: the reply, or the error.
        connected: a new TCP connection was opened for the request.
    """

    number: int
    result: ReplyPart | Exception
    connected: bool


class Channel(asyncio.Protocol):
    """One end of a socket that carries messages. Those of a few milliseconds are pickled and sent together.

    Args:
        take: called with each message that comes.

    Attributes:
        ended: done when the other side has ended, or this one was closed.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Any] = []
        self._received = bytearray()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def over(cls, connected: socket.socket, take: Callable[[Any], None]) -> Channel:
        """Return the channel over a connected socket, which it closes."""
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(take), sock=connected)
        return channel

    def send(self, message: Any) -> None:
        """Send a message, without waiting. After the end of the other side, it is dropped."""
        if not self._waiting:
            self._loop.call_later(_BATCH_SECONDS, self._flush)
        self._waiting.append(message)

    def _flush(self) -> None:
        try:
            batch = pickle.dumps(self._waiting, pickle.HIGHEST_PROTOCOL)
        except Exception:
            # Nobody may wait for these messages.
            self.close()
            raise
        finally:
            self._waiting.clear()
        if not self.ended.done():
            self._transport.write(len(batch).to_bytes(_HEAD_BYTES, "big") + batch)

    def close(self) -> None:
        """End the connection, also where another process has inherited the socket."""
        with contextlib.suppress(OSError):
            self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) >= start + _HEAD_BYTES:
            begin = start + _HEAD_BYTES
            end = begin + int.from_bytes(received[start:begin], "big")
            if len(received) < end:
                break
            for message in pickle.loads(received[begin:end]):
                self._take(message)
            start = end
        del received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
