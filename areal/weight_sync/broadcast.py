"""Send weights by broadcast: from one rank of the trainer to receivers in other processes on any host, over gloo or
NCCL.

The process group has its own TCPStore and is created from the backend's class directly. It is independent of the
default process group, which neither side needs. It is created again when a receiver joins or is lost. NCCL has not
been tested.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.api.control import Control
from areal.engine.checkpoint.async_save import Observe, ignore
from areal.utils import platform
from areal.weight_sync.bucket import DEFAULT_BYTES, check_bucket_bytes
from areal.weight_sync.connection import Connection, Listener, Message
from areal.weight_sync.push import PushSender
from areal.weight_sync.push_receiver import PushReceiver
from areal.weight_sync.transport import Transport, ignore_errors


class BroadcastTransport(Transport):
    """Broadcasts from the first rank. The next bucket is gathered while the current one is sent.

    A dead receiver raises an error with its name on every rank, usually at once and at most after ``timeout``
    seconds. The next update goes to the remaining receivers. Receivers may join between updates.

    Args:
        control: control plane over all ranks of the trainer.
        address: host and port to listen at, on the first rank; port 0 selects a free one.
        receivers: minimum number of connected receivers before an update begins.
        bucket_bytes: size of a bucket; the first rank allocates two.
        cast: dtype in which floating-point tensors are sent.
        device: device of the buckets: CPU for gloo, GPU for NCCL.
        timeout: seconds to wait for any answer of a receiver. Other ranks wait in a collective meanwhile, so it
            must be below their timeout.
        observe: called with the name of each stage.
    """

    def __init__(
        self,
        control: Control,
        address: tuple[str, int] = ("127.0.0.1", 0),
        *,
        receivers: int = 1,
        bucket_bytes: int = DEFAULT_BYTES,
        cast: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        timeout: float = 60.0,
        observe: Observe = ignore,
    ) -> None:
        nbytes = check_bucket_bytes(bucket_bytes)
        self.address: tuple[str, int] | None = None
        sender = None
        # Only the first rank talks to receivers; the others take part in gathering the weights.
        if control.rank == 0:
            listener = Listener(address, timeout)
            self.address = (str(listener.address[0]), int(listener.address[1]))
            buffers = _BroadcastBuffers(nbytes, torch.device(device), timeout)
            sender = PushSender(listener, buffers, receivers, timeout, observe)
        super().__init__(control, sender, cast=cast)


class BroadcastReceiver(PushReceiver):
    """Receives from a :class:`BroadcastTransport`.

    Args:
        address: host and port of the transport.
        module: module to update.
        device: device of the buckets, as in the transport.
        timeout: seconds to find the trainer, and seconds that it may be silent during an update.
        staging: device of the staged update, until it is committed.
    """

    def __init__(
        self,
        address: tuple[str, int],
        module: nn.Module,
        *,
        device: torch.device | str = "cpu",
        timeout: float = 60.0,
        staging: torch.device | str = "cpu",
        observe: Observe = ignore,
    ) -> None:
        connection = Connection.to(address, timeout)
        bucket_receiver = _BroadcastBucketReceiver(address[0], torch.device(device), timeout)
        super().__init__(connection, bucket_receiver, module, timeout=timeout, staging=staging, observe=observe)


class _BroadcastBuffers:
    """Implements :class:`~areal.weight_sync.push.BufferPool`: a bucket is sent by one asynchronous broadcast."""

    def __init__(self, nbytes: int, device: torch.device, timeout: float) -> None:
        self._nbytes, self._device, self._timeout = nbytes, device, timeout
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._members: list[Connection] = []
        # Number of process groups so far. It separates their keys in the store.
        self._epoch = 0
        # Allocated with the first update; each buffer has the pending broadcast that reads it.
        self._buffers: list[Tensor] = []
        self._works: list[Any] = [None, None]
        self.index = 1

    def info(self, members: Sequence[Connection]) -> list[dict[str, Any]]:
        store = self._store
        # The store outlives process groups: a new group only takes another prefix in it.
        if store is None:
            store = self._store = dist.TCPStore(
                "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout)
            )
        # Another set of receivers needs another process group.
        if self._group is None or list(members) != self._members:
            self.abort()
            self._epoch += 1
        size = len(members) + 1
        return [{"port": store.port, "epoch": self._epoch, "rank": rank, "size": size} for rank in range(1, size)]

    def open(self, members: Sequence[Connection]) -> None:
        if not self._buffers:
            self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        # Blocks until all receivers have joined the group; the trainer is its first rank.
        if self._group is None and self._store is not None:
            store = dist.PrefixStore(str(self._epoch), self._store)
            self._group = _group(store, 0, len(members) + 1, self._device, self._timeout)
            self._members = list(members)

    def acquire(self, update: int) -> Tensor:
        self.index = 1 - self.index
        self._wait(self.index)
        return self._buffers[self.index]

    def send_bucket(self, used: int) -> None:
        self._works[self.index] = _broadcast(self._group, self._buffers[self.index][:used])

    def flush(self, update: int) -> None:
        for index in range(2):
            self._wait(index)

    def abort(self) -> None:
        self._works = [None, None]
        group, self._group = self._group, None
        if group is not None:
            ignore_errors(
                group.abort
            )  # its connections close, and waiting receivers fail: at once, or with its last reference (gloo)

    def _wait(self, index: int) -> None:
        work, self._works[index] = self._works[index], None
        if work is not None:
            work.wait(timedelta(seconds=self._timeout))  # with a timeout, NCCL blocks the host too


class _BroadcastBucketReceiver:
    """Implements :class:`~areal.weight_sync.push_receiver.BucketReceiver` on a broadcast group."""

    def __init__(self, host: str, device: torch.device, timeout: float) -> None:
        self._host, self._device, self._timeout = host, device, timeout
        self._group: Any = None
        self._epoch = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def open(self, connection: Connection, info: Message) -> None:
        # Same receivers: the group of the last update is still valid.
        if self._group is not None and info["epoch"] == self._epoch:
            return
        self.abort()
        store = dist.TCPStore(self._host, info["port"], is_master=False, timeout=timedelta(seconds=self._timeout))
        prefixed = dist.PrefixStore(str(info["epoch"]), store)
        self._group = _group(prefixed, info["rank"], info["size"], self._device, self._timeout)
        self._epoch = info["epoch"]

    def receive_bucket(self, index: int, used: int) -> Tensor:
        # Buckets have one size, except the last: the buffer grows once.
        if len(self._buffer) < used:
            self._buffer = torch.empty(used, dtype=torch.uint8, device=self._device)
        _broadcast(self._group, self._buffer[:used]).wait(timedelta(seconds=self._timeout))
        return self._buffer[:used]

    def release(self, connection: Connection, update: int) -> None:
        pass  # the broadcast itself makes the trainer wait

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            ignore_errors(group.abort)


def _group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """Return a process group of the device's backend, independent of all others. All its members are connected.

    Raises:
        ValueError: members share a GPU, which NCCL does not support.
        TimeoutError: a member did not join in time.
    """
    if device.type == "cpu":
        group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    else:
        _check_gpus(store, rank, size, device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        options.config.blocking = 0  # otherwise an abort waits until the communicator exists
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    # NCCL connects the members in the first collective and blocks the host without a timeout, if one is missing.
    element = torch.zeros(1, dtype=torch.uint8, device=device)
    try:
        _within(timeout, lambda: _broadcast(group, element).wait(timedelta(seconds=timeout)))
    except Exception:
        ignore_errors(group.abort)
        raise
    return group


def _check_gpus(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """Raise ``ValueError`` on all members of a group if some of them share a GPU."""
    member = "the trainer" if rank == 0 else f"receiver {socket.gethostname()}:{os.getpid()}"
    keys = [f"gpu/{number}" for number in range(size)]
    store.set(keys[rank], json.dumps([platform.gpu_uuid(device), member]))
    store.wait(keys)
    # Names of the members by GPU.
    members: dict[str, list[str]] = {}
    for uuid, name in map(json.loads, store.multi_get(keys)):
        members.setdefault(uuid, []).append(name)
    for names in members.values():
        if len(names) > 1:
            raise ValueError(
                f"device = 'cuda': {' and '.join(names)} use the same GPU, which NCCL does not support: use "
                "SharedMemoryTransport(device='cuda') on one GPU, or device='cpu'"
            )


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Call a function in a thread, and raise its error.

    Raises:
        TimeoutError: it did not return in time. The thread is left behind.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"the members of the broadcast were not connected within {seconds:g} s")
    if errors:
        raise errors[0]


def _broadcast(group: Any, data: Tensor) -> Any:
    """Start a broadcast from the first rank of a group, on the sender or a receiver."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([data], options)
