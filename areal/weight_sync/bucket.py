"""Weights in buckets: a stream of tensors becomes flat buffers of bytes of one size, and comes out of them again.

A bucket is never larger than the buffer it is put in: a tensor that does not fit into what is left of one is cut, and goes on in the next.
Whoever packs needs one buffer at a time beside the tensor at hand, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.api.weights import NamedTensor

DEFAULT_BYTES = 256 * 2**20
"""Size of a bucket where nothing else is said."""

_ALIGN = 16
"""Where pieces start in a bucket: a multiple of the size of every dtype, so that bytes can be viewed as numbers."""


@dataclass(frozen=True)
class BucketSlice:
    """A stretch of a tensor in a bucket.

    Attributes:
        name, dtype, shape: of the whole tensor.
        start, stop: which of its elements, in row-major order.
        offset: where they begin in the bucket, in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stretch."""
        return (self.stop - self.start) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The stretch, ``[stop - start]`` in its dtype: a view of the bucket's bytes."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype)

    def to_json(self) -> list[Any]:
        """Plain values, for :meth:`from_json`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.name, dtype, list(self.shape), self.start, self.stop, self.offset]

    @classmethod
    def from_json(cls, values: list[Any]) -> BucketSlice:
        """The piece that these values were made from."""
        name, dtype, shape, start, stop, offset = values
        return cls(name, getattr(torch, dtype), tuple(shape), start, stop, offset)


@dataclass(frozen=True)
class Bucket:
    """Some pieces side by side.

    Attributes:
        buffer: uint8, lent by whoever asked for the bucket.
        used: how many of its bytes, from the first, are filled.
    """

    buffer: Tensor
    used: int
    slices: tuple[BucketSlice, ...]


def check_bucket_bytes(nbytes: int) -> int:
    """A size for buckets, rounded down to whole numbers of every dtype.

    Raises:
        ValueError: it is too small for anything.
    """
    if nbytes < _ALIGN:
        raise ValueError(f"bucket_bytes = {nbytes}: give at least {_ALIGN}")
    return nbytes // _ALIGN * _ALIGN


def pack_buckets(tensors: Iterable[NamedTensor], acquire: Callable[[], Tensor]) -> Iterator[Bucket]:
    """Put a stream of tensors into buckets, in order.

    Args:
        tensors: full, from any device.
        acquire: gives a uint8 buffer ``[N]``, whose content may be overwritten, whenever one is needed; it may wait until there is one.

    Yields:
        Buckets, full but for the last. A bucket is finished when it comes, and may be kept until ``acquire`` gives its buffer again.
    """
    buffer: Tensor | None = None
    used, slices = 0, list[BucketSlice]()
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        size, start = flat.dtype.itemsize, 0
        while True:
            buffer = acquire() if buffer is None else buffer
            offset = -(-used // _ALIGN) * _ALIGN
            stop = min(len(flat), start + max(0, len(buffer) - offset) // size)
            if stop == start < len(flat):  # no room
                yield Bucket(buffer, used, tuple(slices))
                buffer, used, slices = None, 0, []
                continue
            bucket_slice = BucketSlice(name, flat.dtype, tuple(tensor.shape), start, stop, offset)
            bucket_slice.view(buffer).copy_(flat[start:stop])
            slices.append(bucket_slice)
            used, start = offset + bucket_slice.nbytes, stop
            if stop == len(flat):
                break
    if buffer is not None:
        yield Bucket(buffer, used, tuple(slices))
