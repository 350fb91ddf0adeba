"""Weights through memory that processes of one host share: two buckets, filled and read in turn.

On the CPU the memory has no name anywhere: it is passed to each receiver as an open file over the line, and the system frees it with the last
process that holds it, however that ends. On CUDA it is two buffers of the trainer's GPU, opened by receivers through CUDA IPC handles.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from areal.engine.checkpoint.async_save import Observe, ignore
from areal.utils.distributed import ControlPlane
from areal.weight_sync.bucket import DEFAULT_BYTES, check_bucket_bytes
from areal.weight_sync.connection import Connection, Listener, Message
from areal.weight_sync.push import PushReceiver, PushSender
from areal.weight_sync.transport import Transport


class SharedMemoryTransport(Transport):
    """Hands weights to receivers on the same host. While they read one bucket, the next is filled; none is overwritten before all have read it.

    A receiver that dies is an error that names it, on every rank; the next update goes to those that are left. Receivers may also join
    between updates.

    Args:
        control: over all ranks of the trainer. The first one sends.
        path: of the socket at which receivers call: at most 100 bytes long, in a directory that only its owner can enter.
        receivers: how many must be there before an update begins.
        bucket_bytes: size of a bucket; there are two, whatever the number of receivers.
        cast: dtype in which floating-point tensors are sent.
        device: where buckets are: host memory, or the trainer's GPU. (The latter has not been run.)
        timeout: seconds that any answer of a receiver may take. Other ranks wait in a collective meanwhile: keep it below their timeout.
        observe: told of each stage.
    """

    def __init__(
        self,
        control: ControlPlane,
        path: str | Path,
        *,
        receivers: int = 1,
        bucket_bytes: int = DEFAULT_BYTES,
        cast: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        timeout: float = 60.0,
        observe: Observe = ignore,
    ) -> None:
        nbytes, device = check_bucket_bytes(bucket_bytes), torch.device(device)
        sender = None
        if control.rank == 0:
            memory: _SharedMemory = _HostMemory(nbytes) if device.type == "cpu" else _DeviceMemory(nbytes, device)
            listener = Listener(str(path), timeout)
            sender = PushSender(listener, _SharedBuffers(memory, timeout), receivers, timeout, observe)
        super().__init__(control, sender, cast=cast)


class SharedMemoryReceiver(PushReceiver):
    """Takes what a :class:`SharedMemoryTransport` sends.

    Args:
        path: of the transport's socket.
        module: to be filled.
        timeout: seconds in which the trainer must be found, and may be silent in the middle of an update.
        staging: where an update is held, whole, until it is committed.
    """

    def __init__(
        self,
        path: str | Path,
        module: nn.Module,
        *,
        timeout: float = 60.0,
        staging: torch.device | str = "cpu",
        observe: Observe = ignore,
    ) -> None:
        connection = Connection.to(str(path), timeout)
        super().__init__(connection, _SharedBucketReceiver(), module, timeout=timeout, staging=staging, observe=observe)


class _SharedMemory(Protocol):
    """Two buffers that another process can open."""

    buffers: tuple[Tensor, Tensor]
    kind: str

    def send_to(self, connection: Connection) -> None:
        """Let the other end open them, which it does at once."""
        ...

    def synchronize(self) -> None:
        """Return when what was written can be read elsewhere."""
        ...


class _SharedBuffers:
    def __init__(self, memory: _SharedMemory, timeout: float) -> None:
        self._memory, self._timeout = memory, timeout
        self._members: list[Connection] = []
        self._mapped_by: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._unread = [False, False]
        self.index = 1

    def info(self, members: Sequence[Connection]) -> list[dict[str, Any]]:
        nbytes = len(self._memory.buffers[0])
        return [
            {"memory": None if connection in self._mapped_by else self._memory.kind, "nbytes": nbytes}
            for connection in members
        ]

    def open(self, members: Sequence[Connection]) -> None:
        self._members = list(members)
        for connection in members:
            if connection not in self._mapped_by:
                self._memory.send_to(connection)
                self._mapped_by.add(connection)

    def acquire(self, update: int) -> Tensor:
        self.index = 1 - self.index
        self._wait_until_read(self.index, update)
        return self._memory.buffers[self.index]

    def send_bucket(self, used: int) -> None:
        self._memory.synchronize()
        self._unread[self.index] = True

    def flush(self, update: int) -> None:
        for index in (1 - self.index, self.index):
            self._wait_until_read(index, update)

    def abort(self) -> None:
        self._unread = [False, False]

    def _wait_until_read(self, index: int, update: int) -> None:
        """Receivers say *read* once for each bucket, in order: the next that comes is about the older one."""
        if self._unread[index]:
            deadline = time.monotonic() + self._timeout
            for connection in self._members:
                connection.expect("read", update, deadline)
            self._unread[index] = False


class _SharedBucketReceiver:
    def __init__(self) -> None:
        self._buffers: tuple[Tensor, ...] = ()

    def open(self, connection: Connection, info: Message) -> None:
        if info["memory"] is not None:
            self._buffers = _OPENERS[info["memory"]](connection, info["nbytes"])

    def receive_bucket(self, index: int, used: int) -> Tensor:
        return self._buffers[index][:used]

    def release(self, connection: Connection, update: int) -> None:
        if self._buffers[0].is_cuda:
            torch.cuda.synchronize(self._buffers[0].device)
        connection.send({"is": "read", "update": update})

    def abort(self) -> None:
        pass  # the buffers are the trainer's, and stay open for its next update


# ---- memory of the host


class _HostMemory:
    kind = "host"

    def __init__(self, nbytes: int) -> None:
        self._file = _anonymous_file(2 * nbytes)
        self.buffers = _map_buffers(self._file, nbytes)

    def send_to(self, connection: Connection) -> None:
        send_handle(connection.pipe, self._file, None)

    def synchronize(self) -> None:
        pass

    def __del__(self) -> None:
        os.close(self._file)


def _map_host_memory(connection: Connection, nbytes: int) -> tuple[Tensor, Tensor]:
    file = recv_handle(connection.pipe)
    try:
        return _map_buffers(file, nbytes)
    finally:
        os.close(file)


def _anonymous_file(nbytes: int) -> int:
    """A descriptor of memory that no path leads to."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("areal-weights", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as unlinked:
            file = os.dup(unlinked.fileno())
    os.ftruncate(file, nbytes)
    return file


def _map_buffers(file: int, nbytes: int) -> tuple[Tensor, Tensor]:
    memory = mmap.mmap(file, 2 * nbytes)  # lives as long as the tensors
    memory_bytes = torch.frombuffer(memory, dtype=torch.uint8)
    return memory_bytes[:nbytes], memory_bytes[nbytes:]


# ---- memory of a GPU


class _DeviceMemory:
    """Has not been run. The caching allocator must not use expandable segments, whose memory has no IPC handles in every release."""

    kind = "device"

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self.buffers = (
            torch.empty(nbytes, dtype=torch.uint8, device=device),
            torch.empty(nbytes, dtype=torch.uint8, device=device),
        )

    def send_to(self, connection: Connection) -> None:
        # Handles are pickled by torch: a receiver trusts whoever owns the directory of the socket.
        connection.pipe.send_bytes(pickle.dumps([reduce_tensor(buffer) for buffer in self.buffers]))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _map_device_memory(connection: Connection, nbytes: int) -> tuple[Tensor, ...]:
    return tuple(rebuild(*args) for rebuild, args in pickle.loads(connection.pipe.recv_bytes()))


_OPENERS: dict[str, Callable[[Connection, int], tuple[Tensor, ...]]] = {
    "host": _map_host_memory,
    "device": _map_device_memory,
}
