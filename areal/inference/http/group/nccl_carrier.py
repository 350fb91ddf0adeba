"""Broadcast over a raw NCCL communicator, as vLLM's workers join it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areal.weight_sync.nccl import NCCLCommunicator, NCCLError, NCCLLibrary


class NCCLCarrier:
    """Implements :class:`~areal.inference.http.group.carrier.Carrier` over NCCL. The id of the group is part of the request.

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
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device)
            comm = NCCLCommunicator(self._library, self._id, 0, self._size, stream, seconds)
            # The workers do the same at once, before anything else.
            with torch.cuda.stream(stream):
                element = torch.zeros(1, device=self.device)
            comm.all_reduce(element, seconds)
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
