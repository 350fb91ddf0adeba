"""API keys and signed download links."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from areal.tinker.api.error_replies import error_response

OPEN_PATHS = ("/api/v1/healthz", "/download/")
"""Beginnings of paths that need no key: the health check, and links that carry a signature."""


class ApiKeys:
    """The accepted keys. Only their hashes are kept in memory."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [self._digest(key) for key in keys]

    @staticmethod
    def _digest(key: str) -> bytes:
        return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

    @property
    def required(self) -> bool:
        """True if a request needs a key."""
        return bool(self._digests)

    def accepts(self, key: str | None) -> bool:
        """Compare a key with every accepted one, in constant time."""
        digest = self._digest(key or "")
        found = False
        for accepted in self._digests:
            found |= hmac.compare_digest(digest, accepted)
        return found and key is not None


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
    """ASGI middleware that answers 401 to a request without an accepted key, before its body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and self.keys.required and not scope["path"].startswith(OPEN_PATHS)
        if not guarded or self.keys.accepts(presented_key(Headers(scope=scope))):
            return await self.app(scope, receive, send)
        # A browser asks for a password; the SDK must not see a challenge, or it would try to exchange the key.
        api = scope["path"].startswith("/api/")
        headers = None if api else {"WWW-Authenticate": 'Basic realm="areal"'}
        response = error_response(401, "The API key is missing or is not accepted by this server.", headers)
        await response(scope, receive, send)


class LinkSigner:
    """Signs download links, which are valid for a limited time and until the server restarts."""

    def __init__(self, lifetime_s: int) -> None:
        self._secret = secrets.token_bytes(32)
        self._lifetime_s = lifetime_s

    def sign(self, *parts: str) -> dict[str, str]:
        """Return the query parameters of a link to the resource that ``parts`` name."""
        expires = str(int(time.time()) + self._lifetime_s)
        return {"expires": expires, "signature": self._signature(expires, *parts)}

    def accepts(self, expires: str, signature: str, *parts: str) -> bool:
        """Return whether the signature belongs to ``parts`` and is not expired."""
        genuine = hmac.compare_digest(self._signature(expires, *parts).encode(), signature.encode())
        return genuine and int(expires) >= time.time()

    def _signature(self, *parts: str) -> str:
        return hmac.new(self._secret, "\0".join(parts).encode(), hashlib.sha256).hexdigest()
