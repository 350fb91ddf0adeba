"""Process groups that are closed together: destroyed at the end of an engine, or aborted after a fault.

``destroy_process_group`` waits for pending collectives, which never complete after a fault. ``abort`` does not wait, and wakes threads that
wait in a collective. Gloo does not support it: the connections of its groups are shut down instead, with the same effect.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_UNLIMITED = timedelta(days=3650)


def as_timeout(seconds: float | None) -> timedelta:
    """Return a timeout for process groups. ``None`` is no limit."""
    return _UNLIMITED if seconds is None else timedelta(seconds=seconds)


class GroupSet:
    """Process groups of one engine on this rank. ``abort`` may be called from any thread.

    Args:
        timeout: seconds that a collective may take. Defaults to the timeout with which a group is created.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._groups: list[dist.ProcessGroup] = []
        self._sockets: dict[int, int] = {}  # inodes of the groups' sockets, by file descriptor
        self._lock = threading.Lock()
        self._aborted = False
        self._on_abort: list[Callable[[], None]] = []

    def on_abort(self, wake: Callable[[], None]) -> None:
        """Let :meth:`abort` call a function that wakes the threads of another runtime. It raises nothing."""
        self._on_abort.append(wake)

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Add the process groups that are created inside."""
        groups, sockets = set(distributed_c10d._world.pg_map), _open_sockets()
        yield
        created = [group for group in distributed_c10d._world.pg_map if group not in groups]
        if self._timeout is not None:
            for group in created:
                distributed_c10d._set_pg_timeout(as_timeout(self._timeout), group)
        with self._lock:
            self._groups += created
            self._sockets |= {fd: inode for fd, inode in _open_sockets().items() if sockets.get(fd) != inode}

    def address(self) -> str:
        """Return an address of this host that the other ranks of the groups can reach."""
        for connection in self._connections():
            with connection:
                return str(connection.getsockname()[0])
        return socket.gethostbyname(socket.gethostname())

    def abort(self) -> None:
        """Abort every collective of these groups on this rank. Threads that wait in one get an error. Raises nothing."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            _abort(list(self._groups))
            for connection in self._connections():
                with connection, contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for wake in self._on_abort:
            wake()

    def close(self) -> None:
        """Close the groups: destroy them, which waits for pending collectives, or forget them after :meth:`abort`."""
        with self._lock:
            groups, self._groups = self._groups, []
            self._sockets.clear()
            # No variable of this frame may keep a reference to a group: its connections close with the last one.
            while groups:
                if self._aborted:
                    with contextlib.suppress(Exception):
                        distributed_c10d._abort_process_group(groups.pop())
                else:
                    dist.destroy_process_group(groups.pop())

    def _connections(self) -> Iterator[socket.socket]:
        """Yield the connected sockets of the groups that are still open, each as a duplicate."""
        for fd, inode in self._sockets.items():
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino != inode:
                    continue
                connection = socket.socket(fileno=os.dup(fd))
                try:
                    connection.getpeername()
                except OSError:  # a listener
                    connection.close()
                    continue
                yield connection


def _abort(groups: list[dist.ProcessGroup]) -> None:
    """Abort groups. NCCL's are aborted as one group operation: one after the other, they could wait for each other."""
    nccl = next((backend for group in groups if (backend := _nccl_backend(group)) is not None), None)
    with contextlib.suppress(Exception):
        if nccl is not None:
            nccl._group_start()
        for group in groups:
            with contextlib.suppress(Exception):
                group.abort()
        if nccl is not None:
            nccl._group_end()


def _nccl_backend(group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend of a group, or ``None``."""
    if not dist.is_nccl_available():
        return None
    with contextlib.suppress(RuntimeError):
        backend = group._get_backend(torch.device("cuda"))
        return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
    return None


def _open_sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets by file descriptor; nothing where the system does not list them."""
    sockets = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets[int(name)] = status.st_ino
    return sockets
