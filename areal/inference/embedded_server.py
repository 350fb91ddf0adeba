"""HTTP servers on an event loop that does other work, too."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn


class EmbeddedServer(uvicorn.Server):
    """A server that leaves signals to the process in which it runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 takes a free one.

    Raises:
        OSError: the port is in use, or the address is not of this host.
    """
    listener = socket.create_server((host, port), backlog=2048)
    # Connections inherit it. Without it, the end of each answer waits 40 ms for a delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
