"""Connection to one server: requests, errors, and retries with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp
from pydantic import ValidationError
from yarl import URL

from areal.inference.http.servers.http_call import Anything, HTTPCall, ReplyBody

R = TypeVar("R", bound=ReplyBody)

HEALTH = HTTPCall.get("/health", Anything)
"""Request that a healthy server answers at once, also while it generates."""
_CONNECT_SECONDS = 10.0
_HEALTH_SECONDS = 10.0
"""Maximum seconds for the reply to :data:`HEALTH`."""
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0
"""Seconds without new requests after the first fault, doubled with each further fault in a row, up to the maximum."""
_KEEPALIVE_SECONDS = 3.0
"""Seconds that an idle TCP connection is kept. Servers close it after 5, and may do so when a request is on its way."""
_JSON = {"content-type": "application/json"}
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


class StatusError(Exception):
    """The server answered with a status other than 200, below 500.

    Attributes:
        status: status of the answer.
        text: body of the answer.
    """

    def __init__(self, report: str, status: int, text: str) -> None:
        super().__init__(report)
        self.status, self.text = status, text


class RejectedCall(StatusError, ValueError):
    """Status 400, 413 or 422: the request is wrong."""


class UnexpectedStatus(StatusError, RuntimeError):
    """Any other status."""


class ServerConnection:
    """Sends requests to one server. All methods run on one event loop.

    Args:
        url: base URL.
        headers: headers of each request, such as an API key.

    Attributes:
        url: base URL.
        backoff_until: time on the monotonic clock until which the server should get no new requests, after a fault.
        away_since: time of the first request that got no answer, if none has got one since.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.backoff_until = 0.0
        self.away_since: float | None = None
        self._faults = 0
        self._headers = headers
        self._http: aiohttp.ClientSession | None = None  # made on the event loop

    def _session(self) -> aiohttp.ClientSession:
        """Return the TCP connections, of which as many are open as there are requests."""
        if self._http is None:
            traced = aiohttp.TraceConfig()
            traced.on_connection_create_end.append(_note_connection)
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                trace_configs=[traced],
                trust_env=False,  # servers are in the cluster: no proxy
            )
        return self._http

    async def send(self, call: HTTPCall[R], seconds: float | None, on_connect: Callable[[], None] | None = None) -> R:
        """Send one request, without retries. Errors name the server and the route.

        Args:
            call: route, body and type of the reply.
            seconds: time limit; ``None`` for no limit after the connection is made.
            on_connect: called if the request opens a new TCP connection.

        Raises:
            Unavailable: the connection failed, the time limit passed, or the status is 500 or above.
            RejectedCall: the server rejects the request (400, 413, 422).
            RuntimeError: any other status (:class:`UnexpectedStatus`), or a reply that does not have the documented form.
        """
        body = None if call.method == "GET" else call.body.model_dump_json(exclude_none=True).encode()
        try:
            async with (
                asyncio.timeout(seconds),
                self._session().request(
                    call.method,
                    URL(self.url + call.route, encoded=True),
                    params=call.query or None,
                    data=body,
                    headers=None if body is None else _JSON,
                    allow_redirects=False,
                    trace_request_ctx=on_connect,
                ) as answer,
            ):
                status, content = answer.status, await answer.read()
        except TimeoutError as error:
            self._miss()
            raise Unavailable(
                f"{self.url}{call.route}: no answer within {seconds or _CONNECT_SECONDS:.3g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            self._miss()
            raise Unavailable(f"{self.url}{call.route}: {type(error).__name__}: {error}") from error
        self.away_since = None
        if status != 200:
            raise self._refusal(call.route, status, content.decode(errors="replace"))
        self._faults = 0
        return self._read(call, content)

    def _refusal(self, route: str, status: int, text: str) -> Exception:
        """Return the error of a reply with another status than 200. Server errors may be retried; rejected requests may not."""
        report = f"{self.url}{route}: status {status}: {text[:_SHOWN]}"
        if status >= 500:
            self._back_off()
            return Unavailable(report, status, text)
        return (RejectedCall if status in (400, 413, 422) else UnexpectedStatus)(report, status, text)

    async def send_patiently(
        self, call: HTTPCall[R], silence: float, on_connect: Callable[[], None], on_life: Callable[[], None]
    ) -> R:
        """Call :meth:`send` without a time limit, as long as the server is healthy.

        Args:
            call: route, body and type of the reply.
            silence: seconds without a reply after which the server is asked for its health, again and again.
            on_connect: see :meth:`send`.
            on_life: called when the server has told that it is healthy.

        Raises:
            Unavailable: the connection failed, the status is 500 or above, or the server is not healthy.
            RuntimeError, ValueError: see :meth:`send`.
        """
        request = asyncio.get_running_loop().create_task(self.send(call, None, on_connect))
        try:
            while not (await asyncio.wait({request}, timeout=silence))[0]:
                await self._check_health(call.route, silence)
                on_life()
            return request.result()
        finally:
            if not request.done():
                request.cancel()
                await asyncio.wait({request})

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

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

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

    def _miss(self) -> None:
        """Note that there was no answer."""
        if self.away_since is None:
            self.away_since = time.monotonic()
        self._back_off()

    def _back_off(self) -> None:
        """Send no new requests for a while. Randomised, so that several engines do not retry together."""
        if time.monotonic() < self.backoff_until:
            return  # one fault, seen by all requests that were running
        self._faults += 1
        seconds = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** (self._faults - 1))
        self.backoff_until = time.monotonic() + seconds * random.uniform(0.5, 1.0)


async def _note_connection(_: Any, context: SimpleNamespace, __: Any) -> None:
    """Tell the sender of a request that it has opened a TCP connection."""
    if context.trace_request_ctx is not None:
        context.trace_request_ctx()
