"""Copy a stream of tensors into chunks of whole tensors, and cut a chunk into the buffers that are broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api.weights import NamedTensor
from areal.engine.checkpoint.safetensors import TensorSpec

PACKED_BYTES = 2**30
"""Default of vLLM for the size of a packed buffer."""

CHUNK_BYTES = 256 * 2**20
"""Default size of a chunk."""

_FIRST_BYTES = 16 * 2**20
"""Size up to which chunks are small."""

_ALIGN = 16
"""Alignment of tensors that are not packed: a multiple of the size of every dtype."""


@dataclass(frozen=True)
class Chunk:
    """Tensors that one request announces.

    Attributes:
        specs: names, dtypes and shapes in the order of the buffers.
        buffers: contiguous tensors to broadcast: one per tensor, or packed bytes.
    """

    specs: tuple[TensorSpec, ...]
    buffers: tuple[Tensor, ...]

    @property
    def names(self) -> str:
        """Names of the first and the last tensor, for errors."""
        return f"{self.specs[0].name} to {self.specs[-1].name}"


class ChunkMemory:
    """Two buffers that take turns: one is filled while the other one is sent. They grow to the largest tensor.

    Args:
        nbytes: maximum size of a chunk, unless a single tensor is larger.
        device: device of the buffers.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._device = nbytes, device
        self.release()

    def release(self) -> None:
        """Give up both buffers."""
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self._device)] * 2
        self._index = 0

    def take(self, nbytes: int) -> Tensor:
        """Return the buffer that was not taken last, uint8 ``[N]`` with at least this size."""
        self._index = 1 - self._index
        if len(self._buffers[self._index]) < nbytes:
            self._buffers[self._index] = self.allocate(max(nbytes, self.nbytes))
        return self._buffers[self._index]

    def allocate(self, nbytes: int) -> Tensor:
        """Return a new buffer, uint8 ``[nbytes]``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def cut_chunks(tensors: Iterable[NamedTensor], memory: ChunkMemory, packed_bytes: int | None = None) -> Iterator[Chunk]:
    """Copy a stream of tensors into chunks. No tensor is split.

    A chunk has at most half of the bytes before it, or 16 MiB: servers load one while the next one is filled, also if a model would fit
    into one chunk.

    Args:
        tensors: full tensors on any device. Each may be overwritten when the next one is taken.
        memory: buffers of the chunks. A chunk is valid until the next but one.
        packed_bytes: a packed buffer ends after the tensor that exceeds this size, and with its chunk. ``None`` does not pack.

    Yields:
        Chunks with at least one tensor. Their buffers are complete on the device.
    """
    builder: _Builder | None = None
    sent, limit = 0, min(_FIRST_BYTES, memory.nbytes)
    for name, tensor in tensors:
        if builder is not None and not builder.fits(tensor.nbytes, limit):
            yield builder.build()
            builder = None
        if builder is None:
            limit = min(max(_FIRST_BYTES, sent // 2), memory.nbytes)
            builder = _Builder(memory.take(tensor.nbytes), packed_bytes)
        builder.add(name, tensor.detach())
        sent += tensor.nbytes
        # A full chunk does not wait for the next tensor.
        if not builder.fits(1, limit):
            yield builder.build()
            builder = None
    if builder is not None:
        yield builder.build()


class _Builder:
    """A chunk in the making."""

    def __init__(self, memory: Tensor, packed_bytes: int | None) -> None:
        self._memory, self._packed_bytes = memory, packed_bytes
        self._specs: list[TensorSpec] = []
        self._buffers: list[Tensor] = []
        self._used = 0
        self._closed = 0  # end of the last packed buffer

    @property
    def open_bytes(self) -> int:
        """Size of the packed buffer that is not closed."""
        return self._used - self._closed

    def fits(self, nbytes: int, limit: int) -> bool:
        """Return whether a further tensor fits into the chunk."""
        return self._offset() + nbytes <= min(limit, len(self._memory))

    def add(self, name: str, tensor: Tensor) -> None:
        offset = self._offset()
        self._used = offset + tensor.nbytes
        self._specs.append(TensorSpec(name, tensor.dtype, tuple(tensor.shape)))
        place = self._memory[offset : self._used]
        if self._packed_bytes is None:
            self._buffers.append(place.view(tensor.dtype).view(tensor.shape).copy_(tensor))
            return
        # As bytes: packed tensors are not aligned to their dtypes.
        place.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        # The receiver sums the same sizes and cuts after the tensor that exceeds the limit, not before.
        if self.open_bytes > self._packed_bytes:
            self.close()

    def close(self) -> None:
        """End a packed buffer."""
        self._buffers.append(self._memory[self._closed : self._used])
        self._closed = self._used

    def build(self) -> Chunk:
        if self._packed_bytes is not None and self.open_bytes:
            self.close()
        # Buffers are read by another stream, from another thread.
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()
        return Chunk(tuple(self._specs), tuple(self._buffers))

    def _offset(self) -> int:
        return self._used if self._packed_bytes is not None else -(-self._used // _ALIGN) * _ALIGN
