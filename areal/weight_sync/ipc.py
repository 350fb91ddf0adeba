"""Send weights through memory that processes of one host share: two buckets, filled and read in turn.

On the CPU the memory is an anonymous file. Its descriptor is sent to each receiver over the control connection, and
the system frees it with the last process that uses it, even if that process is killed. On CUDA the memory is two
buffers of the trainer's GPU, which receivers open through CUDA IPC handles.
"""

from __future__ import annotations

import inspect
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

from areal.api.control import Control
from areal.engine.checkpoint.async_save import Observe, ignore
from areal.utils import platform
from areal.weight_sync.bucket import DEFAULT_BYTES, check_bucket_bytes
from areal.weight_sync.connection import Connection, Listener, Message
from areal.weight_sync.push import PushSender
from areal.weight_sync.push_receiver import PushReceiver
from areal.weight_sync.transport import Transport


class SharedMemoryTransport(Transport):
    """Sends weights to receivers on the same host.

    The next bucket is filled while receivers read the current one, and a bucket is overwritten only after all
    receivers have read it.

    A dead receiver raises an error with its name on every rank. The next update goes to the remaining receivers.
    Receivers may join between updates.

    Args:
        control: control plane over all ranks of the trainer. The first rank sends.
        path: path of the socket at which receivers connect, at most 100 bytes, in a directory that only its owner
            can enter.
        receivers: minimum number of connected receivers before an update begins.
        bucket_bytes: size of a bucket; there are two, regardless of the number of receivers.
        cast: dtype in which floating-point tensors are sent.
        device: device of the buckets: host memory, or the trainer's GPU (not tested).
        timeout: seconds to wait for any answer of a receiver. Other ranks wait in a collective meanwhile, so it
            must be below their timeout.
        observe: called with the name of each stage.
    """

    def __init__(
        self,
        control: Control,
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
    """Receives from a :class:`SharedMemoryTransport`.

    Args:
        path: path of the transport's socket.
        module: module to update.
        timeout: seconds to find the trainer, and seconds that it may be silent during an update.
        staging: device of the staged update, until it is committed.
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
    """Two buffers that other processes can map."""

    buffers: tuple[Tensor, Tensor]
    kind: str

    def send_to(self, connection: Connection) -> None:
        """Send the handle of the buffers to a receiver, which maps them immediately."""
        ...

    def synchronize(self) -> None:
        """Wait until earlier writes are visible to other processes."""
        ...


class _SharedBuffers:
    """Implements :class:`~areal.weight_sync.push.BufferPool`: a bucket is sent by announcing it."""

    def __init__(self, memory: _SharedMemory, timeout: float) -> None:
        self._memory, self._timeout = memory, timeout
        self._members: list[Connection] = []
        # Receivers that have mapped the memory in an earlier update; weak, so that disconnected ones are forgotten.
        self._mapped_by: weakref.WeakSet[Connection] = weakref.WeakSet()
        # True for a buffer that some receiver may still be reading.
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
        # The older bucket first, in the order of the receivers' messages.
        for index in (1 - self.index, self.index):
            self._wait_until_read(index, update)

    def abort(self) -> None:
        self._unread = [False, False]

    def _wait_until_read(self, index: int, update: int) -> None:
        """Wait until all receivers have read a buffer.

        Receivers send *read* once per bucket, in order, so that the next message refers to the older bucket.
        """
        if self._unread[index]:
            # One deadline for all receivers.
            deadline = time.monotonic() + self._timeout
            for connection in self._members:
                connection.expect("read", update, deadline)
            self._unread[index] = False


class _SharedBucketReceiver:
    """Implements :class:`~areal.weight_sync.push_receiver.BucketReceiver` on mapped memory."""

    def __init__(self) -> None:
        self._buffers: tuple[Tensor, ...] = ()

    def open(self, connection: Connection, info: Message) -> None:
        if info["memory"] is not None:
            self._buffers = _OPENERS[info["memory"]](connection, info["nbytes"])

    def receive_bucket(self, index: int, used: int) -> Tensor:
        return self._buffers[index][:used]

    def release(self, connection: Connection, update: int) -> None:
        # Copies out of a GPU buffer are asynchronous: finish them before the trainer overwrites it.
        if self._buffers[0].is_cuda:
            torch.cuda.synchronize(self._buffers[0].device)
        connection.send({"is": "read", "update": update})

    def abort(self) -> None:
        pass  # the buffers belong to the trainer and stay mapped for the next update


# ---- memory of the host


class _HostMemory:
    """Implements :class:`_SharedMemory` in host memory, as an anonymous file."""

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
    """Receive the descriptor of the trainer's memory and map its buffers."""
    file = recv_handle(connection.pipe)
    # The mapping keeps the memory alive without the descriptor.
    try:
        return _map_buffers(file, nbytes)
    finally:
        os.close(file)


def _anonymous_file(nbytes: int) -> int:
    """Return a file descriptor of memory without a path."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("areal-weights", os.MFD_CLOEXEC)
    else:
        # Systems without memfd: a temporary file, already unlinked.
        with tempfile.TemporaryFile() as unlinked:
            file = os.dup(unlinked.fileno())
    os.ftruncate(file, nbytes)
    return file


def _map_buffers(file: int, nbytes: int) -> tuple[Tensor, Tensor]:
    memory = mmap.mmap(file, 2 * nbytes)  # is freed with the tensors
    memory_bytes = torch.frombuffer(memory, dtype=torch.uint8)
    return memory_bytes[:nbytes], memory_bytes[nbytes:]


# ---- memory of a GPU


class _DeviceMemory:
    """Implements :class:`_SharedMemory` on a GPU. Not tested.

    The caching allocator must not use expandable segments, which do not have IPC handles in every release.
    """

    kind = "device"

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self.buffers = (
            torch.empty(nbytes, dtype=torch.uint8, device=device),
            torch.empty(nbytes, dtype=torch.uint8, device=device),
        )

    def send_to(self, connection: Connection) -> None:
        # A handle names its GPU by this process's index: the UUID names it for the receiver.
        uuid = platform.gpu_uuid(self.buffers[0].device)
        # torch pickles handles: receivers must trust the owner of the socket's directory.
        connection.pipe.send_bytes(pickle.dumps((uuid, [reduce_tensor(buffer) for buffer in self.buffers])))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _map_device_memory(connection: Connection, nbytes: int) -> tuple[Tensor, ...]:
    """Receive the IPC handles of the trainer's buffers and open them."""
    uuid, handles = pickle.loads(connection.pipe.recv_bytes())
    visible = platform.gpu_uuids()
    return tuple(rebuild(*with_own_index(rebuild, args, uuid, visible)) for rebuild, args in handles)


def with_own_index(
    rebuild: Callable[..., Tensor], args: Sequence[Any], uuid: str, visible: Sequence[str]
) -> tuple[Any, ...]:
    """Return the arguments of a CUDA IPC handle with the index that this process has for the GPU.

    Processes with different ``CUDA_VISIBLE_DEVICES`` number the same GPU differently.

    Args:
        rebuild: torch's function that opens the handle.
        args: its arguments, from the process that allocated the memory.
        uuid: UUID of the GPU with the memory.
        visible: UUIDs of the GPUs that this process sees, by index.

    Raises:
        ValueError: this process does not see the GPU.
    """
    if uuid not in visible:
        raise ValueError(
            f"device = 'cuda': the buckets are on the trainer's GPU {uuid}, and this receiver sees {', '.join(visible) or 'none'}: add "
            "that GPU to CUDA_VISIBLE_DEVICES of the receiver, or use device='cpu'"
        )
    names = list(inspect.signature(rebuild).parameters)
    own = list(args)
    own[names.index("storage_device")] = visible.index(uuid)
    return tuple(own)


_OPENERS: dict[str, Callable[[Connection, int], tuple[Tensor, ...]]] = {
    "host": _map_host_memory,
    "device": _map_device_memory,
}
