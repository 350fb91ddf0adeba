"""The connections of this process over which the collectives of JAX run on a CPU, by gloo.

JAX cannot abort a collective. If its connections are shut down, it raises, as those of torch's gloo groups do
(:mod:`areal.utils.group_set`). JAX opens them when a program first needs them: they are recognized by their ports.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

Address = tuple[str, int]


def listening() -> set[Address]:
    """Return the addresses at which this process listens."""
    found = set()
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_address(connection.getsockname()))
    return found


def shut_down(listeners: set[Address]) -> None:
    """Shut down all connections with one of these listening addresses at either end. Threads that wait for one get an error."""
    for connection in _sockets():
        # A socket without a peer is a listener, or not of TCP.
        with connection, contextlib.suppress(OSError):
            if {_address(connection.getsockname()), _address(connection.getpeername())} & listeners:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets; nothing where the system does not list them."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                duplicate = socket.socket(fileno=os.dup(int(name)))
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                    yield duplicate
                else:
                    duplicate.close()


def _address(name: tuple[str, int]) -> Address:
    return name[0], name[1]
