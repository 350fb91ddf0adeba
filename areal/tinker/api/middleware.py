"""What a request passes before its route: its id and log line, the caller by its key, and its body, bounded and decompressed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import time
import uuid
from collections.abc import Collection, Sequence

import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.tinker.api.error_replies import BodyError, error_response
from areal.tinker.api.key_file import User, key_digest
from areal.tinker.api.metrics import ServerMetrics
from areal.tinker.service.tenants.caller import Caller

OPEN_PATHS = ("/api/v1/healthz", "/download/")
"""Beginnings of paths that need no key: the health check, and links that carry a signature."""


logger = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware that gives each request an id, which the header ``X-Request-ID`` of the answer and the log name."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = uuid.uuid4().hex[:16]
        status = 0  # of no answer: the client has disconnected

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        start = time.perf_counter()
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            # The path, without the query: a link's signature is not logged.
            logger.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if status:
                raise
            response = error_response(500, f"Internal error; the server's log has it under {request_id}.")
            await response(scope, receive, send_with_id)
        finally:
            self.metrics.in_flight.dec()
            # The pattern of the route, not the path: each series of a metric stays in memory.
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.answered(route, status, time.perf_counter() - start)


class ApiKeys:
    """The accepted keys and their users.

    Args:
        owner: the caller of all requests if there are no users.
    """

    def __init__(self, users: Sequence[User], owner: str) -> None:
        self._callers = [(user.digest, user.caller) for user in users]
        self._anyone = None if users else Caller(owner, admin=True)

    def caller(self, key: str | None) -> Caller | None:
        """Return the caller whose key this is, or ``None``. Compares with every accepted key, in constant time."""
        if key is None or not self._callers:
            return self._anyone
        digest = key_digest(key)
        caller: Caller | None = None
        for accepted, user in self._callers:
            if hmac.compare_digest(digest, accepted):
                caller = user
        return caller


def presented_key(headers: Headers) -> str | None:
    """Return the key of a request: ``X-API-Key``, a bearer token, or the password of HTTP basic (for browsers)."""
    if (key := headers.get("x-api-key")) is not None:
        return key
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(value.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return None
        return decoded.partition(":")[2]
    return None


class Authentication:
    """ASGI middleware that finds the caller of a request, or answers 401 before the body is read.

    Routes find the caller in ``request.state``, but those of :data:`OPEN_PATHS`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OPEN_PATHS):
            return await self.app(scope, receive, send)
        caller = self.keys.caller(presented_key(Headers(scope=scope)))
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
            return await self.app(scope, receive, send)
        # A browser asks for a password; the SDK must not see a challenge, or it would try to exchange the key.
        api = scope["path"].startswith("/api/")
        headers = None if api else {"WWW-Authenticate": 'Basic realm="areal"'}
        response = error_response(401, "The API key is missing or is not accepted by this server.", headers)
        await response(scope, receive, send)


MAX_WINDOW_BYTES = 32 * 1024 * 1024
PIECE_BYTES = 256
"""Compressed bytes that are decompressed at once. A block of a frame takes 4 bytes and expands to 128 KiB at most."""


def decompress(data: bytes, limit: int) -> bytes:
    """Return a decompressed zstd body.

    Raises:
        BodyError: 400 if the data is damaged or truncated; 413 if it expands to more than ``limit`` bytes, before they are allocated.
    """
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        if stated not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) and stated > limit:
            raise BodyError(413, f"The body expands to {stated} bytes; the limit of this route is {limit}")
        # The stated size may be wrong or missing: the output is counted while it grows.
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        pieces, total = [], 0
        for start in range(0, len(data), PIECE_BYTES):
            pieces.append(frame.decompress(data[start : start + PIECE_BYTES]))
            total += len(pieces[-1])
            if total > limit:
                raise BodyError(413, f"The body expands to more than {limit} bytes, the limit of this route")
            if frame.eof:
                break
    except zstandard.ZstdError as error:
        raise BodyError(400, f"The body is not valid zstd: {error}") from None
    if not frame.eof:
        raise BodyError(400, "The zstd body is truncated")
    if frame.unused_data or start + PIECE_BYTES < len(data):
        raise BodyError(400, "The zstd body continues after its first frame")
    return b"".join(pieces)


class BodyLimits:
    """ASGI middleware that reads the body of a request before a route runs.

    Args:
        large_paths: paths of bodies up to ``max_body_bytes``. Those of other paths have up to ``max_json_bytes``.
    """

    def __init__(self, app: ASGIApp, large_paths: Collection[str], max_body_bytes: int, max_json_bytes: int) -> None:
        self.app, self.large_paths = app, large_paths
        self.max_body_bytes, self.max_json_bytes = max_body_bytes, max_json_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit = self.max_body_bytes if scope["path"] in self.large_paths else self.max_json_bytes
        try:
            body = await self._read(scope, receive, limit)
        except BodyError as error:
            # The rest of the body is not read: the connection cannot be used again.
            return await error_response(error.status, str(error), {"Connection": "close"})(scope, receive, send)
        if body is None:  # the client has disconnected
            return None
        delivered = False

        async def receive_body() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_body, send)

    async def _read(self, scope: Scope, receive: Receive, limit: int) -> bytes | None:
        headers = MutableHeaders(scope=scope)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "zstd"):
            raise BodyError(415, f"Content-Encoding {encoding!r} is not supported; send zstd, or no encoding")
        # The stated length refuses a large body before any of it is received.
        stated = headers.get("content-length", "0")
        if stated.isdecimal() and int(stated) > limit:
            raise BodyError(413, f"The body has {stated} bytes; the limit of this route is {limit}")
        pieces, total, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            total += len(pieces[-1])
            more = message.get("more_body", False)
            if total > limit:
                raise BodyError(413, f"The body has more than {limit} bytes, the limit of this route")
        body = b"".join(pieces)
        if encoding == "zstd":
            # Decompression takes milliseconds per megabyte: other requests go on in the meantime.
            body = await asyncio.to_thread(decompress, body, limit)
            del headers["content-encoding"]
            headers["content-length"] = str(len(body))
        return body
