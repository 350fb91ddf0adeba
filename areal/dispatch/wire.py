"""The wire format of batches and results: their tensors in a few flat arrays, which a pickle of protocol 5 carries out of band."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Bytes of a number -> a dtype of this size that can be concatenated."""

_CONCATENATED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)
"""Dtypes that ``torch.cat`` supports. Tensors of others are concatenated as bits."""


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """A value whose tensors were replaced. Pickle it with protocol 5 and a ``buffer_callback``.

    Attributes:
        value: the value, with references in place of tensors. Everything else in it is left to the pickler, which may be that of
            cloudpickle if there are functions.
        arrays: bytes of the tensors, end to end.
        dtypes: dtype of each array.
        sizes: number of elements of each tensor, for each array.
        buffers: memory of the objects in ``value``, if that is pickled.
    """

    value: Any
    arrays: tuple[NDArray[np.uint8], ...]
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[list[int], ...]
    buffers: tuple[NDArray[np.uint8], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and buffers."""
        return sum(array.nbytes for array in (*self.arrays, *self.buffers))


def pack_tensors(value: Any) -> Packed:
    """Copy the tensors of a value to flat arrays on the host.

    Tensors are found in lists, dicts, tuples and named tuples of any depth. A list of dicts with the same keys, the usual batch, becomes one
    array for each key and dtype; all other tensors become one array for each dtype. Subclasses of tensors, sparse tensors, and tensors inside
    other objects are pickled as usual.

    Args:
        value: any value. It is not changed. Gradients do not travel.
    """
    packing = _Packing()
    return packing.packed(packing.take(value, ""))


def unpack_tensors(packed: Packed) -> Any:
    """Return the value that was packed, with CPU tensors in new memory.

    Memory of the arrays is not used: it may be read-only, or shared with other processes. Numpy arrays in lists, dicts and tuples are copied,
    too. Tensors of one array are views of one buffer.
    """
    flats = [
        _copy_of(array, dtype).split(sizes)
        for array, dtype, sizes in zip(packed.arrays, packed.dtypes, packed.sizes, strict=True)
    ]
    return _Unpacking(flats).restore(packed.value)


# ---- references


@dataclass(frozen=True, slots=True)
class _One:
    """A tensor: item ``index`` of an array."""

    array: int
    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Several:
    """A list of tensors: consecutive items of an array. ``shapes`` is ``None`` if all have one dimension."""

    array: int
    start: int
    count: int
    shapes: list[tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """A list of dicts with the same keys, by key."""

    keys: tuple[Any, ...]
    columns: tuple[Any, ...]
    count: int


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A list of one object ``count`` times."""

    value: Any
    count: int


class _Packing:
    """Collects the tensors of a value by array."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, tuple[int, list[Tensor]]] = {}

    def packed(self, value: Any) -> Packed:
        """Concatenate the collected tensors."""
        groups = [tensors for _, tensors in self._groups.values()]
        return Packed(
            value,
            tuple(_bytes_of(tensors) for tensors in groups),
            tuple(tensors[0].dtype for tensors in groups),
            tuple([x.numel() for x in tensors] for tensors in groups),
        )

    def take(self, value: Any, name: str) -> Any:
        """Return a value with references in place of tensors. A container without tensors is returned itself.

        Args:
            value: any value.
            name: tensors of different names are in different arrays.
        """
        kind = type(value)
        if kind is Tensor:
            return self._one(value, name) if _is_packed(value) else value
        if kind is list:
            return self._list(value, name)
        if kind is dict:
            taken = {key: self.take(item, name) for key, item in value.items()}
            return taken if _differs(taken.values(), value.values()) else value
        if isinstance(value, tuple):
            items = [self.take(item, name) for item in value]
            return _tuple_like(value, items) if _differs(items, value) else value
        return value

    def _list(self, value: list[Any], name: str) -> Any:
        first, count = (value[0] if value else None), len(value)
        # One object for all samples, such as the ``meta`` of a batch, stays one object.
        if count > 1 and all(item is first for item in value):
            return _Repeated(self.take(first, name), count)
        if _is_uniform(value):
            array, tensors = self._group(value[0], name)
            start = len(tensors)
            tensors += value
            flat = all(x.dim() == 1 for x in value)
            return _Several(array, start, count, None if flat else [tuple(x.shape) for x in value])
        if (
            count > 1
            and type(first) is dict
            and all(type(item) is dict and item.keys() == first.keys() for item in value)
        ):
            columns = (self.take([item[key] for item in value], f"{name}/{key}") for key in first)
            return _Rows(tuple(first), tuple(columns), count)
        items = [self.take(item, name) for item in value]
        return items if _differs(items, value) else value

    def _one(self, x: Tensor, name: str) -> _One:
        array, tensors = self._group(x, name)
        tensors.append(x)
        return _One(array, len(tensors) - 1, tuple(x.shape))

    def _group(self, x: Tensor, name: str) -> tuple[int, list[Tensor]]:
        return self._groups.setdefault((name, x.dtype, x.device), (len(self._groups), []))


class _Unpacking:
    """Puts tensors in place of references.

    Args:
        flats: tensors of each array, with one dimension.
    """

    def __init__(self, flats: Sequence[Sequence[Tensor]]) -> None:
        self._flats = flats
        # Copies of numpy arrays, with the arrays, whose ids must stay in use.
        self._copies: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}

    def restore(self, value: Any) -> Any:
        """Return the value with tensors in place of references. A container without references is returned itself."""
        kind = type(value)
        if kind is _Rows:
            columns = [self.restore(column) for column in value.columns]
            return [dict(zip(value.keys, row, strict=True)) for row in zip(*columns, strict=True)] or [
                {} for _ in range(value.count)
            ]
        if kind is _Several:
            tensors = self._flats[value.array][value.start : value.start + value.count]
            return (
                list(tensors)
                if value.shapes is None
                else [x.view(s) for x, s in zip(tensors, value.shapes, strict=True)]
            )
        if kind is _One:
            return self._flats[value.array][value.index].view(value.shape)
        if kind is _Repeated:
            return [self.restore(value.value)] * value.count
        if kind is dict:
            restored = {key: self.restore(item) for key, item in value.items()}
            return restored if _differs(restored.values(), value.values()) else value
        if kind is list or isinstance(value, tuple):
            items = [self.restore(item) for item in value]
            if not _differs(items, value):
                return value
            return items if kind is list else _tuple_like(value, items)
        if kind is np.ndarray:
            if id(value) not in self._copies:
                self._copies[id(value)] = (value.copy(), value)
            return self._copies[id(value)][0]
        return value


def _is_packed(x: Any) -> bool:
    """Return whether the numbers of a tensor can be copied to an array."""
    return type(x) is Tensor and x.layout is torch.strided and not x.is_meta and not x.is_quantized


def _is_uniform(value: list[Any]) -> bool:
    """Return whether a list has only tensors that fit in one array."""
    if not value or not _is_packed(value[0]):
        return False
    dtype, device = value[0].dtype, value[0].device
    return all(_is_packed(x) and x.dtype is dtype and x.device == device for x in value)


def _bytes_of(tensors: list[Tensor]) -> NDArray[np.uint8]:
    """Return the bytes of tensors of one dtype and device, in one array on the host."""
    dtype = tensors[0].dtype
    with torch.no_grad():
        rows = [x if x.dim() == 1 else x.reshape(-1) for x in tensors]
        if dtype not in _CONCATENATED:
            rows = [x.view(_BITS[dtype.itemsize]) for x in rows]
        # Tensors of a device are concatenated there, so that they are copied to the host at once.
        return torch.cat(rows).cpu().view(torch.uint8).numpy()


def _copy_of(array: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """Return the numbers of an array in new memory."""
    flat = torch.empty(array.nbytes // dtype.itemsize, dtype=dtype)
    flat.view(torch.uint8).numpy()[:] = array
    return flat


def _differs(items: Iterable[Any], others: Iterable[Any]) -> bool:
    return any(a is not b for a, b in zip(items, others, strict=True))


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same type: plain, named, or another subclass that is made from an iterable."""
    kind = type(value)
    return kind(*items) if hasattr(value, "_fields") else kind(items)
