"""Connection to one server: TCP connections, requests, errors, and retries with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast
from urllib.parse import urlencode, urlsplit

import httptools
from pydantic import ValidationError

from areal.inference.http.servers.dialect import ReplyPart, Routes
from areal.inference.http.servers.http_call import Anything, HTTPCall, ReplyBody
from areal.inference.protocol import Sampling

R = TypeVar("R", bound=ReplyBody)
Reply = tuple[int, bytes]
"""Status and body."""

HEALTH = HTTPCall.get("/health", Anything)
"""Request that a healthy server answers at once, also while it generates."""
_CONNECT_SECONDS = 10.0
_KEEPALIVE_SECONDS = 3.0
"""Seconds that an idle connection is kept. Servers close it after 5, and may do so when a request is on its way."""
_HEALTH_SECONDS = 10.0
"""Maximum seconds for the reply to :data:`HEALTH`."""
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0
"""Seconds without new requests after the first fault, doubled with each further fault in a row, up to the maximum."""
_SHOWN = 300
"""Maximum number of characters of a server's reply in an error message."""


class Unavailable(RuntimeError):
    """The server could not be reached or reports an internal error: another attempt may succeed.

    Attributes:
        status: status of the answer; ``None`` if there was none.
        text: body of the answer; empty if there was none.
    """

    def __init__(self, report: str, status: int | None = None, text: str = "") -> None:
        super().__init__(report)
        self.status, self.text = status, text

    def __reduce__(self) -> tuple[type[Unavailable], tuple[str, int | None, str]]:
        return type(self), (str(self), self.status, self.text)


class ClientLost(RuntimeError):
    """The client process that had sent a request has ended: another attempt may succeed."""


class StatusError(Exception):
    """The server answered with a status other than 200, below 500.

    Attributes:
        status: status of the answer.
        text: body of the answer.
    """

    def __init__(self, report: str, status: int, text: str) -> None:
        super().__init__(report)
        self.status, self.text = status, text

    def __reduce__(self) -> tuple[type[StatusError], tuple[str, int, str]]:
        return type(self), (str(self), self.status, self.text)


class RejectedCall(StatusError, ValueError):
    """Status 400, 413 or 422: the request is wrong."""


class UnexpectedStatus(StatusError, RuntimeError):
    """Any other status."""


class HTTPConnection(asyncio.Protocol):
    """One TCP connection, which carries one HTTP/1.1 request at a time. It costs less than that of a general client.

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


class ServerConnection:
    """Sends requests to one server. All methods run on one event loop.

    Args:
        url: base URL.
        headers: headers of each request, such as an API key.

    Attributes:
        url: base URL.
        headers: as given.
        backoff_until: time on the monotonic clock until which the server should get no new requests, after a fault.
        away_since: time of the first request that got no answer, if none has got one since.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url, self.headers = url.rstrip("/"), headers or {}
        self.backoff_until = 0.0
        self.away_since: float | None = None
        self._backoff_seconds = _FIRST_BACKOFF  # after the next fault
        self._connections = HTTPConnections(self.url, self.headers)

    async def generate(
        self,
        routes: Routes,
        call: HTTPCall[ReplyBody],
        sampling: Sampling,
        seconds: float,
        on_connect: Callable[[], None],
        on_life: Callable[[], None],
    ) -> ReplyPart:
        """Send a request for an answer and read the reply.

        Args:
            routes: requests of the server.
            call: request of :meth:`~areal.inference.http.servers.dialect.Routes.generate`.
            sampling: sampling parameters of the answer.
            seconds, on_connect, on_life: see :meth:`send`.

        Raises:
            Unavailable, RejectedCall, RuntimeError: see :meth:`send`. Or the reply has impossible content.
            ClientLost: the process that sent it ended.
        """
        body = await self.send(call, seconds, on_connect, on_life)
        try:
            return routes.read_reply(body, sampling)
        except ValueError as error:
            raise RuntimeError(f"{self.url}{call.route}: the reply cannot be: {error}") from error

    async def send(
        self,
        call: HTTPCall[R],
        seconds: float,
        on_connect: Callable[[], None] | None = None,
        on_life: Callable[[], None] | None = None,
    ) -> R:
        """Send one request, without retries. Errors name the server and the route.

        Args:
            call: route, body and type of the reply.
            seconds: time limit. With ``on_life``, seconds without a reply after which the server is asked for its health, again and again:
                while it is healthy, there is no limit.
            on_connect: called if the request opens a new TCP connection.
            on_life: called when the server has told that it is healthy.

        Raises:
            Unavailable: the connection failed, the time limit passed, the server is not healthy, or the status is 500 or above.
            RejectedCall: the server rejects the request (400, 413, 422).
            RuntimeError: any other status (:class:`UnexpectedStatus`), or a reply that does not have the documented form.
        """
        body = None if call.method == "GET" else call.body.model_dump_json(exclude_none=True).encode()
        request = self._connections.request(call.method, call.route, call.query, body)
        connection, begin = None, time.monotonic()
        try:
            connection = await self._connections.take(min(seconds, _CONNECT_SECONDS), on_connect)
            reply = connection.send(request)
            left = begin + seconds - time.monotonic()
            while not (await asyncio.wait({reply}, timeout=left))[0]:
                if on_life is None:
                    raise TimeoutError
                await self._check_health(call.route, seconds)
                on_life()
                left = seconds
            status, content = reply.result()
        except TimeoutError as error:
            self.note(None)
            waited = seconds if connection is not None else min(seconds, _CONNECT_SECONDS)
            raise Unavailable(f"{self.url}{call.route}: no answer within {waited:.3g} s") from error
        except OSError as error:
            self.note(None)
            raise Unavailable(f"{self.url}{call.route}: {type(error).__name__}: {error}") from error
        finally:
            if connection is not None:
                self._connections.put(connection)
        self.note(status)
        if status != 200:
            raise self._refusal(call.route, status, content.decode(errors="replace"))
        return self._read(call, content)

    def _refusal(self, route: str, status: int, text: str) -> Exception:
        """Return the error of a reply with another status than 200. Server errors may be retried; rejected requests may not."""
        report = f"{self.url}{route}: status {status}: {text[:_SHOWN]}"
        if status >= 500:
            return Unavailable(report, status, text)
        return (RejectedCall if status in (400, 413, 422) else UnexpectedStatus)(report, status, text)

    async def _check_health(self, route: str, silence: float) -> None:
        """Raise :class:`Unavailable` unless the server is healthy, while a request to ``route`` has no reply."""
        try:
            await self.send(HEALTH, min(silence, _HEALTH_SECONDS))
        except StatusError:
            pass  # it has no such route, and is there
        except Unavailable as error:
            raise Unavailable(f"{self.url}{route}: no answer within {silence:.3g} s; {error}", error.status) from error

    async def insist(
        self, call: HTTPCall[R], deadline: float, *, fails: bool = False, before: Sequence[HTTPCall[ReplyBody]] = ()
    ) -> R:
        """Call :meth:`send` until it succeeds or ``deadline``, on the monotonic clock, passes.

        Args:
            call: route, body and type of the reply.
            deadline: time on the monotonic clock.
            fails: a status of 500 means that the call cannot succeed.
            before: requests sent before each attempt, which may fail.

        Raises:
            Unavailable: the last fault of the server that it explained itself, or the last one.
            RuntimeError, ValueError: see :meth:`send`.
        """
        said: Unavailable | None = None
        while True:
            for each in before:
                with contextlib.suppress(StatusError, Unavailable):
                    await self.send(each, max(0.05, deadline - time.monotonic()))
            try:
                return await self.send(call, max(0.05, deadline - time.monotonic()))
            except Unavailable as error:
                if error.text or said is None:
                    said = error
                if self.backoff_until >= deadline or (fails and error.status == 500):
                    raise said from error.__cause__
                await asyncio.sleep(max(0.0, self.backoff_until - time.monotonic()))

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def _read(self, call: HTTPCall[R], content: bytes) -> R:
        """Parse and validate a reply."""
        # Some routes reply with text or nothing.
        if not call.reply.model_fields:
            return call.reply()
        try:
            return call.reply.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "json_invalid":
                raise RuntimeError(f"{self.url}{call.route}: the reply is no JSON: {content[:_SHOWN]!r}") from error
            field = ".".join(str(key) for key in first["loc"])
            raise RuntimeError(
                f"{self.url}{call.route}: the field {field!r} of the reply does not fit: {first['msg']}. Is it a server of this kind "
                "and of a release that is supported?"
            ) from error

    def note(self, status: int | None) -> None:
        """Note the status of an answer; ``None`` if there was none."""
        if status is not None:
            self.away_since = None
        elif self.away_since is None:
            self.away_since = time.monotonic()
        if status is None or status >= 500:
            self._back_off()
        elif status == 200:
            self._backoff_seconds = _FIRST_BACKOFF

    def _back_off(self) -> None:
        """Send no new requests for a while. Randomised, so that several engines do not retry together."""
        if time.monotonic() < self.backoff_until:
            return  # one fault, seen by all requests that were running
        self.backoff_until = time.monotonic() + self._backoff_seconds * random.uniform(0.5, 1.0)
        self._backoff_seconds = min(_LONGEST_BACKOFF, 2 * self._backoff_seconds)
