"""Pack a stream of tensors into flat byte buffers of one size, and unpack them.

A bucket never exceeds its buffer: a tensor that does not fit into the remaining space is split and continues in the
next bucket. Packing needs one buffer plus the current tensor, regardless of model size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.api.weights import NamedTensor

DEFAULT_BYTES = 256 * 2**20
"""Default size of a bucket."""

_ALIGN = 16
"""Alignment of slices in a bucket: a multiple of the size of every dtype, so that bytes can be viewed as numbers."""


@dataclass(frozen=True)
class BucketSlice:
    """A contiguous range of a tensor's elements, stored in a bucket.

    Attributes:
        name, dtype, shape: name, dtype and shape of the full tensor.
        start, stop: range of its elements, in row-major order.
        offset: position of the range in the bucket, in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the slice in bytes."""
        return (self.stop - self.start) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the slice, ``[stop - start]`` in its dtype, as a view of the bucket's bytes."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype)

    def to_json(self) -> list[Any]:
        """Return plain values for :meth:`from_json`."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.name, dtype, list(self.shape), self.start, self.stop, self.offset]

    @classmethod
    def from_json(cls, values: list[Any]) -> BucketSlice:
        """Return the slice from the values of :meth:`to_json`."""
        name, dtype, shape, start, stop, offset = values
        return cls(name, getattr(torch, dtype), tuple(shape), start, stop, offset)


@dataclass(frozen=True)
class Bucket:
    """Slices of tensors in one buffer.

    Attributes:
        buffer: uint8 ``[N]``, from the ``acquire`` of :func:`pack_buckets`.
        used: number of bytes that are filled, from the beginning.
        slices: slices in the order of their offsets.
    """

    buffer: Tensor
    used: int
    slices: tuple[BucketSlice, ...]


def check_bucket_bytes(nbytes: int) -> int:
    """Return a bucket size, rounded down to whole elements of every dtype.

    Raises:
        ValueError: the size is too small for any element.
    """
    if nbytes < _ALIGN:
        raise ValueError(f"bucket_bytes = {nbytes}: give at least {_ALIGN}")
    return nbytes // _ALIGN * _ALIGN


def pack_buckets(tensors: Iterable[NamedTensor], acquire: Callable[[], Tensor]) -> Iterator[Bucket]:
    """Pack a stream of tensors into buckets, in order.

    Args:
        tensors: full tensors from any device.
        acquire: returns a uint8 buffer ``[N]`` that may be overwritten. May block until a buffer is free.

    Yields:
        Full buckets; the last one may be partly filled. A bucket is valid until ``acquire`` returns its buffer
        again.
    """
    buffer: Tensor | None = None
    used, slices = 0, list[BucketSlice]()
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        size, start = flat.dtype.itemsize, 0
        while True:
            # Acquire lazily, so that no buffer is taken for an empty rest of the stream.
            buffer = acquire() if buffer is None else buffer
            # As many elements as fit behind the aligned end of the last slice.
            offset = -(-used // _ALIGN) * _ALIGN
            stop = min(len(flat), start + max(0, len(buffer) - offset) // size)
            if stop == start < len(flat):  # no space for a single element: the bucket is full
                yield Bucket(buffer, used, tuple(slices))
                buffer, used, slices = None, 0, []
                continue
            # The copy also moves the values to the buffer's device.
            bucket_slice = BucketSlice(name, flat.dtype, tuple(tensor.shape), start, stop, offset)
            bucket_slice.view(buffer).copy_(flat[start:stop])
            slices.append(bucket_slice)
            used, start = offset + bucket_slice.nbytes, stop
            if stop == len(flat):
                break
    if buffer is not None:
        yield Bucket(buffer, used, tuple(slices))
