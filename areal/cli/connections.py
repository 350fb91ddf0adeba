"""Connections of the HTTP server: at most so many, and a request must arrive in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

GRACE_S = 1.0
"""Seconds after the time of a request, in which a loop that was busy receives what has arrived."""


def connection_class(max_connections: int, read_timeout_s: float) -> type[HttpToolsProtocol]:
    """Return the class of a server's connections.

    Args:
        max_connections: most open connections. A further one is closed at once.
        read_timeout_s: seconds in which the head of a request must arrive, and each further piece of its body.
    """

    class Connection(HttpToolsProtocol):
        """A connection that is closed if the client does not finish a request."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
            else:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._wait()
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            self._wait()
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._stop()
            super().on_message_complete()

        def _wait(self) -> None:
            self._stop()
            self._deadline = self.loop.call_later(read_timeout_s, self._look_again)

        def _look_again(self) -> None:
            self._deadline = self.loop.call_later(min(GRACE_S, read_timeout_s), self.transport.abort)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Connection
