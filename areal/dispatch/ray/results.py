"""Calls, batches and results between the driver and the ranks: pickled before Ray sends them, and read into new memory."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import numpy as np
from ray import ObjectRef, cloudpickle

from areal.dispatch.executor import Work
from areal.dispatch.wire import Packed, pack_tensors, unpack_tensors


def seal(value: Any, what: str, limit: int) -> Packed:
    """Return the form of a result that is sent: what is not a tensor is pickled here, where its size and errors are known.

    Args:
        value: result of a rank.
        what: name of the result, for errors.
        limit: bytes above which it is not sent.

    Raises:
        ValueError: the result cannot be sent, or is larger than the limit.
    """
    try:
        packed = _pickled(value)
    except Exception as error:
        raise ValueError(
            f"{what} cannot be sent to the driver: {error}: return tensors, numbers, strings, and lists and dicts of these"
        ) from error
    nbytes = packed.nbytes + len(packed.value)
    if nbytes > limit:
        raise ValueError(
            f"{what} has {nbytes:,} bytes, and max_result_bytes = {limit:,}: return less, for instance of a smaller batch, or raise "
            "RayWorkers(max_result_bytes=...)"
        )
    return packed


def seal_batch(value: Any) -> Packed:
    """Return the form of a batch that is sent.

    Raises:
        ValueError: the batch cannot be sent.
    """
    try:
        return _pickled(value)
    except Exception as error:
        raise ValueError(
            f"the batch cannot be sent to the ranks: {error}: keep only data in it, and make other objects (a lock, a file, a connection) in a "
            "function of run(fn)"
        ) from error


def unseal(sealed: Packed) -> Any:
    """Return a sealed value in new memory.

    Buffers in the object store are shared by all processes of a node. An array on them is read-only, but a tensor on that array is not.
    """
    value = cloudpickle.loads(sealed.value, buffers=[bytearray(buffer) for buffer in sealed.buffers])
    return unpack_tensors(dataclasses.replace(sealed, value=value, buffers=()))


def _pickled(value: Any) -> Packed:
    """Pack a value, and pickle what is not a tensor, with the memory of its arrays apart."""
    packed, buffers = pack_tensors(value), list[PickleBuffer]()
    pickled = cloudpickle.dumps(packed.value, protocol=5, buffer_callback=buffers.append)
    return dataclasses.replace(
        packed, value=pickled, buffers=tuple(np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers)
    )


class _WorkPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles everything but references to the object store, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.refs: list[ObjectRef] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, ObjectRef):
            return None
        self.refs.append(value)
        return len(self.refs) - 1


class _WorkUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, refs: Sequence[ObjectRef]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._refs = refs

    def persistent_load(self, index: int) -> ObjectRef:
        return self._refs[index]


def pickle_work(work: Work) -> tuple[bytes, list[ObjectRef]]:
    """Return the pickle of a call's work, and its references to the object store, which Ray itself must pickle.

    Ray keeps the object of a reference that others pickle until the driver ends.
    """
    file = io.BytesIO()
    pickler = _WorkPickler(file)
    pickler.dump(work)
    return file.getvalue(), pickler.refs


def unpickle_work(pickled: bytes, refs: Sequence[ObjectRef]) -> Work:
    """Return the work of :func:`pickle_work`."""
    work: Work = _WorkUnpickler(pickled, refs).load()
    return work
