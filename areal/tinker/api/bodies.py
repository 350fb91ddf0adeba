"""Reading of request bodies: bounded, and decompressed if the client compressed them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import zstandard
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.tinker.api.error_replies import BodyError, error_response

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
