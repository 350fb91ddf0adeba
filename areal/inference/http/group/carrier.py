"""Carriers, which broadcast buffers from the trainer, rank 0, to the workers of all servers: over gloo, torch.distributed or NCCL."""

from __future__ import annotations

import base64
import secrets
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from areal.weight_sync.nccl import NCCLCommunicator, NCCLError, NCCLLibrary
from areal.weight_sync.transport import ignore_errors


class Meeting(Protocol):
    """A process group of the trainer and the workers, which is created again after each :meth:`abort`."""

    def open(self, size: int) -> Mapping[str, Any]:
        """Prepare a new group. Does not wait.

        Args:
            size: number of members, including the trainer.

        Returns:
            Values with which the workers join, in addition to their rank and ``size``.
        """
        ...

    def join(self, seconds: float) -> None:
        """Wait until all members have joined.

        Raises:
            RuntimeError, TimeoutError: a member is missing. The group must be aborted.
        """
        ...

    def abort(self) -> None:
        """Leave the group at once, also during a call in another thread. Must not raise. May be called twice."""
        ...


class Carrier(Meeting, Protocol):
    """A group in which the trainer broadcasts buffers.

    Attributes:
        device: device of the buffers.
    """

    @property
    def device(self) -> torch.device: ...

    def broadcast(self, buffers: Sequence[Tensor], seconds: float) -> None:
        """Send buffers to all members, in order, and wait until they are sent.

        Raises:
            RuntimeError, TimeoutError: a member is lost. The group must be aborted.
        """
        ...


def in_thread(work: Callable[[], None], name: str) -> Future[None]:
    """Start a function in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            # Frames hold the group. A gloo group closes its connections with its last reference, and its members wait until then.
            traceback.clear_frames(error.__traceback__)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class _StoreCarrier(ABC):
    """A group of ``torch.distributed`` whose members meet at a store of the trainer.

    Args:
        address: host name of the trainer, as the servers see it.
        device: device of the buffers.
    """

    def __init__(self, address: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._address = address
        self._size = 0
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    def open(self, size: int) -> Mapping[str, str | int]:
        self._size = size
        self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return {"master_address": self._address, "master_port": self._store.port}

    def join(self, seconds: float) -> None:
        # One look: an abort in another thread takes the store away, and gloo without a store ends the process.
        store = self._store
        if store is None:
            raise RuntimeError("no group was opened, or it was aborted")
        store.set_timeout(timedelta(seconds=seconds))
        group = self._make(store, timedelta(seconds=seconds))
        if self._store is not store:
            self._end(group)
            raise RuntimeError("the group was aborted while its members joined")
        self._group = group

    @abstractmethod
    def _make(self, store: dist.TCPStore, timeout: timedelta) -> Any:
        """Return the group once all members have joined."""

    @abstractmethod
    def _end(self, group: Any) -> None:
        """Leave a group, as far as it does more than to lose its last reference."""

    def abort(self) -> None:
        # Closes the connections of gloo, so that waiting workers fail at once: ``ProcessGroupGloo.abort`` closes none.
        group, self._group, self._store = self._group, None, None
        if group is not None:
            self._end(group)

    def broadcast(self, buffers: Sequence[Tensor], seconds: float) -> None:
        group, options = self._group, dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=seconds)
        for buffer in buffers:
            if group is None or group is not self._group:
                raise RuntimeError("the group was aborted")
            group.broadcast([buffer], options).wait(timedelta(seconds=seconds))


class GlooCarrier(_StoreCarrier):
    """Implements :class:`Carrier` over gloo.

    vLLM has no such backend. Its workers need a plugin that registers one and joins a ``ProcessGroupGloo`` on the store at
    ``master_address`` and ``master_port``.

    Args:
        address: host name of the trainer, as the servers see it.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__(address, "cpu")

    def _make(self, store: dist.TCPStore, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, 0, self._size, timeout)

    def _end(self, group: Any) -> None:
        """Do nothing: the group ends with its last reference."""


class TorchCarrier(_StoreCarrier):
    """Implements :class:`Carrier` on a group of ``torch.distributed``.

    Args:
        address: host name of the trainer, as the servers see it.
        backend: ``"nccl"`` or ``"gloo"``.
        device: device of the buffers: a GPU for NCCL, the CPU for gloo.
        name: prefix of the group's name.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        backend: str = "nccl",
        device: torch.device | str = "cuda",
        name: str = "areal-weights",
    ) -> None:
        if (backend == "gloo") != (torch.device(device).type == "cpu"):
            raise ValueError(
                f"backend = {backend!r} with device = {str(device)!r}: choose gloo with cpu, or nccl with cuda"
            )
        super().__init__(address, device)
        self._backend, self._prefix, self._name = backend, name, ""

    def open(self, size: int) -> Mapping[str, str | int]:
        # Unlike that of any other process: workers keep the group of a trainer that was killed.
        self._name = f"{self._prefix}-{secrets.token_hex(8)}"
        return {**super().open(size), "group_name": self._name, "backend": self._backend}

    def _make(self, store: dist.TCPStore, timeout: timedelta) -> Any:
        # As the workers do: the prefixes of the keys must be equal, and they depend on this function.
        group, _ = _new_process_group_helper(
            self._size,
            0,
            [],
            dist.Backend(self._backend),
            dist.PrefixStore(self._name, store),
            group_name=GroupName(self._name),
            timeout=timeout,
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self._size)}
        return group

    def _end(self, group: Any) -> None:
        ignore_errors(group.abort)
        ignore_errors(lambda: dist.destroy_process_group(group))


def join_workers(
    library: NCCLLibrary, unique_id: bytes, rank: int, size: int, device: torch.device, seconds: float
) -> tuple[NCCLCommunicator, torch.cuda.Stream]:
    """Join a group of NCCL with workers of vLLM. Arguments as of :class:`NCCLCommunicator`.

    Returns:
        The communicator, and its stream on the device.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        comm = NCCLCommunicator(library, unique_id, rank, size, stream, seconds)
        # The workers do the same at once, before anything else.
        with torch.cuda.stream(stream):
            element = torch.zeros(1, device=device)
        comm.all_reduce(element, seconds)
    return comm, stream


class NCCLCarrier:
    """Implements :class:`Carrier` over NCCL. The id of the group is part of the request.

    Args:
        device: GPU of the trainer's first rank. No worker may use the same one.
        library: functions of NCCL. By default those of the library that PyTorch uses.

    Raises:
        ValueError: the device is not a GPU.
    """

    def __init__(self, device: torch.device | str, *, library: NCCLLibrary | None = None) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device = {str(device)!r}: NCCL needs a GPU; choose 'cuda'")
        self._library = library
        self._size, self._id = 0, b""
        self._comm: NCCLCommunicator | None = None
        self._aborted = threading.Event()

    def open(self, size: int) -> Mapping[str, str | int]:
        if self._library is None:
            self._library = NCCLLibrary()
        self._size, self._id = size, self._library.unique_id()
        self._aborted = threading.Event()
        # vLLM decodes the standard alphabet only.
        return {"nccl_unique_id_b64": base64.b64encode(self._id).decode()}

    def join(self, seconds: float) -> None:
        if self._library is None:
            raise RuntimeError("no group was opened")
        aborted = self._aborted
        comm, _ = join_workers(self._library, self._id, 0, self._size, self.device, seconds)
        self._comm = comm
        # Aborted while the members joined.
        if aborted.is_set():
            comm.abort()

    def broadcast(self, buffers: Sequence[Tensor], seconds: float) -> None:
        with torch.cuda.device(self.device):
            for buffer in buffers:
                if self._comm is None:
                    raise RuntimeError("the group was aborted")
                self._comm.broadcast(buffer, 0, seconds)

    def abort(self) -> None:
        self._aborted.set()
        comm, self._comm = self._comm, None
        if comm is not None:
            try:
                comm.abort()
            except NCCLError:
                return  # it is unusable anyway, and nothing waits for it
