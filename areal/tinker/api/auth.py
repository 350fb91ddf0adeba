"""API keys and signed download links."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from areal.tinker.api.error_replies import error_response
from areal.tinker.api.key_file import User, key_digest
from areal.tinker.service.tenants.caller import Caller

OPEN_PATHS = ("/api/v1/healthz", "/download/")
"""Beginnings of paths that need no key: the health check, and links that carry a signature."""


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
