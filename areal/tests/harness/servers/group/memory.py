"""Memory that other processes open by a handle, as that of a GPU by CUDA's: files, one for the memory of each GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.inference.http.group import IPCCarrier
from areal.inference.http.group.ipc import IPCMemory
from areal.inference.http.servers.group_routes import Handles

DEVICE = 6
"""Index of the device in the arguments of ``rebuild_cuda_tensor``, which a worker replaces by its own."""


class FileMemory(IPCMemory):
    """Buffers in files of a folder."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        super().__init__(nbytes, torch.device("cpu"))
        self._folder, self._made = folder, 0

    def allocate(self, nbytes: int) -> Tensor:
        self._made += 1
        file = self._folder / str(self._made)
        buffer = torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8)
        files[buffer.data_ptr()] = file
        return buffer


files: dict[int, Path] = {}
"""File by address of a buffer."""


class FileCarrier(IPCCarrier):
    """Implements the carrier on files.

    Args:
        gpu: id of the GPU that this rank has.
        chunk_bytes: maximum size of a chunk.
    """

    def __init__(self, gpu: str, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self._folder = tempfile.TemporaryDirectory(prefix="areal-memory-")
        self.gpu, self.reclaimed = gpu, 0
        self.given = FileMemory(chunk_bytes, Path(self._folder.name))

    def memory(self) -> FileMemory:
        return self.given

    def share(self, buffer: Tensor) -> Handles:
        # In the places of ``rebuild_cuda_tensor``: tensor class, size, stride, offset, storage class, dtype, device, handle, bytes.
        file = files[buffer.data_ptr()]
        handle = (
            torch.Tensor,
            tuple(buffer.shape),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            0,
            str(file),
            len(buffer),
        )
        return {self.gpu: handle}

    def reclaim(self) -> None:
        self.reclaimed += 1


def opened(handle: tuple[Any, ...]) -> Tensor:
    """Return the memory of a handle, uint8 ``[N]``, as ``rebuild_cuda_tensor`` does."""
    return torch.from_file(handle[DEVICE + 1], shared=True, size=handle[DEVICE + 2], dtype=torch.uint8)
