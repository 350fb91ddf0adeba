"""TCP connections to one server, each of which carries one HTTP/1.1 request at a time. They cost less than those of a general client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlencode, urlsplit

import httptools

Reply = tuple[int, bytes]
"""Status and body."""

_KEEPALIVE_SECONDS = 3.0
"""Seconds that an idle connection is kept. Servers close it after 5, and may do so when a request is on its way."""


class HTTPConnection(asyncio.Protocol):
    """One connection.

    Attributes:
        is_free: True if another request can be sent.
        since: time on the monotonic clock of the last reply.
    """

    def __init__(self) -> None:
        self._reply: asyncio.Future[Reply] | None = None
        self.is_free, self.since = True, time.monotonic()
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def send(self, request: bytes) -> asyncio.Future[Reply]:
        """Send a request. Returns the future of its reply, which fails with an ``OSError``."""
        self._reply, self.is_free = asyncio.get_running_loop().create_future(), False
        self._transport.write(request)
        return self._reply

    def close(self) -> None:
        """Close the connection. A server aborts the request that it has not answered."""
        self.is_free = False
        if self._reply is not None:
            self._reply.cancel()
        self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.connection_lost(ConnectionError(f"the reply is no HTTP: {error!r}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_free = False
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error or ConnectionResetError("the server closed the connection"))

    # ---- called by the parser

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        # A reply without a request, or after a cancelled one, leaves the connection unusable.
        if self._reply is None or self._reply.done():
            self.close()
            return
        self._reply.set_result((self._parser.get_status_code(), b"".join(self._body)))
        self._body.clear()
        self.is_free, self.since = self._parser.should_keep_alive(), time.monotonic()


class HTTPConnections:
    """All connections to one server, of which as many are open as there are requests.

    Args:
        url: base URL.
        headers: headers of each request.

    Raises:
        ValueError: the URL is none of a server, or a header has more than one line.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"url = {url!r}: the address of a server is http://HOST:PORT or https://HOST:PORT")
        for name, value in headers.items():
            if "\n" in value or "\r" in value:
                raise ValueError(f"the header {name!r} has more than one line: take line breaks out of the key")
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._is_secure else 80)
        self._path = parts.path
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"host": parts.netloc, **headers}.items())
        self._free: deque[HTTPConnection] = deque()  # the one that was used last is at the end

    def request(self, method: str, route: str, query: Mapping[str, str], body: bytes | None) -> bytes:
        """Return the bytes of a request with a body of JSON, or without one."""
        target = f"{self._path}{route}?{urlencode(query)}" if query else self._path + route
        end = "" if body is None else f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"{method} {target} HTTP/1.1\r\n{self._head}{end}\r\n".encode("latin-1") + (body or b"")

    async def take(self, seconds: float, on_connect: Callable[[], None] | None) -> HTTPConnection:
        """Return a free connection, or a new one. :meth:`put` takes it back.

        Args:
            seconds: time limit of a new connection.
            on_connect: called if the connection is new.

        Raises:
            OSError, TimeoutError: the server cannot be reached.
        """
        oldest = time.monotonic() - _KEEPALIVE_SECONDS
        while self._free:
            connection = self._free.pop()
            if connection.is_free and connection.since > oldest:
                return connection
            connection.close()
        async with asyncio.timeout(seconds):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                HTTPConnection, self._host, self._port, ssl=self._is_secure or None
            )
        if on_connect is not None:
            on_connect()
        return connection

    def put(self, connection: HTTPConnection) -> None:
        """Keep a connection whose request was answered, and close one whose request was not."""
        if connection.is_free:
            self._free.append(connection)
        else:
            connection.close()
        # Those that nobody needs any more are at the start.
        oldest = time.monotonic() - _KEEPALIVE_SECONDS
        while self._free and self._free[0].since < oldest:
            self._free.popleft().close()

    def close(self) -> None:
        """Close the connections that are free."""
        while self._free:
            self._free.popleft().close()
