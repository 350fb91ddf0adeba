"""The activations of one forward of a layer: saved, moved to host memory, and brought back."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from areal.engine.torch.activations.host_pool import HostPool
from areal.engine.torch.activations.saved_storage import ActivationBytes, SavedStorage
from areal.utils.platform import SideCopies

SMALLEST_BYTES = 64 * 2**10
"""Smaller storages stay on the device: a copy of so many bytes takes as long as its launch."""


class OffloadTools(NamedTuple):
    """Objects that all layers of an engine share.

    Attributes:
        device: device of the engine.
        copies: copies between the device and host memory.
        pool: host memory.
        counts: bytes at present.
    """

    device: torch.device
    copies: SideCopies
    pool: HostPool
    counts: ActivationBytes


class KnownStorages:
    """The storages that the layers of one forward of a model have saved, so that each is moved once."""

    def __init__(self, tools: OffloadTools) -> None:
        self._tools = tools
        # The weak reference to a storage keeps its address from being used again.
        self._found: dict[int, tuple[weakref.ref[SavedStorage], StorageWeakRef]] = {}

    def get(self, memory: torch.UntypedStorage) -> tuple[SavedStorage, bool]:
        """Return the record of a storage, and whether it is new."""
        found = self._found.get(memory._cdata)
        known = None if found is None else found[0]()
        if known is not None:
            return known, False
        new = SavedStorage(memory, self._tools.device, self._tools.counts)
        self._found[memory._cdata] = weakref.ref(new), StorageWeakRef(memory)
        return new, True


@dataclass(slots=True)
class SavedView:
    """A tensor that a layer has saved: a view of a storage."""

    storage: SavedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class LayerActivations:
    """The activations of one forward of a layer.

    Args:
        tools: of the engine.
        known: storages of this forward of the model.
        previous: activations of the layer before, which the backward needs next; ``None`` for the first layer.
    """

    def __init__(self, tools: OffloadTools, known: KnownStorages, previous: LayerActivations | None) -> None:
        self._tools, self._known, self._previous = tools, known, previous
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._blocks: Sequence[Tensor] = ()
        self._in_host = 0
        self._leaving = self._needed = False
        self._departure: Any = None  # mark behind the copies to host memory

    # ---- hooks of autograd

    def pack(self, x: Tensor) -> SavedView | Tensor:
        """Return what an autograd graph keeps of a tensor."""
        # Distributed tensors are weights. Others of these describe their memory in their own way.
        plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
        if not plain or x.device.type != self._tools.device.type or x.is_conj() or x.is_neg():
            return x.detach()
        storage, new = self._known.get(x.untyped_storage())
        if new:
            self._storages.append(weakref.ref(storage))
        return SavedView(storage, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, saved: SavedView | Tensor) -> Tensor:
        """Return the tensor again, with its values, shape and strides. The first call brings all activations of the layer back."""
        if isinstance(saved, Tensor):
            return saved
        self._begin_backward()
        # A storage that an earlier layer has saved first comes back alone.
        if saved.storage.memory is None and saved.storage.host:
            _bring_back([saved.storage], self._tools)
        memory = saved.storage.read(self._tools.copies)
        return torch.empty(0, dtype=saved.dtype, device=self._tools.device).set_(
            memory, saved.offset, saved.shape, saved.stride
        )

    # ---- forward

    def close(self, weights: Collection[int]) -> None:
        """End the forward of the layer.

        Args:
            weights: keys of the storages of weights and buffers, which stay where they are.
        """
        del self._known
        kept = [x for x in self._alive() if x.key not in weights]
        self._storages = [weakref.ref(x) for x in kept]
        for storage in kept:
            storage.count()

    def leave(self) -> None:
        """Start to copy the activations to host memory."""
        storages = [x for x in self._alive() if x.nbytes >= SMALLEST_BYTES]
        if not storages:
            return
        sizes = [x.nbytes for x in storages]
        self._blocks, pieces = self._tools.pool.take(sizes)
        for storage, host in zip(storages, pieces, strict=True):
            storage.host = host
        self._departure = self._tools.copies.run([pair for x in storages for pair in x.copies_out()])
        self._leaving, self._in_host = True, sum(sizes)
        self._tools.counts.change_in_host(self._in_host)

    def free(self) -> None:
        """Free the memory of what was copied to host memory."""
        if not self._leaving:
            return
        self._leaving = False
        # Later work, which may get the memory, runs after the copies.
        self._tools.copies.wait(self._departure)
        for storage in self._alive():
            if storage.host:
                storage.leave()

    # ---- backward

    def bring_back(self) -> None:
        """Start to copy the activations to the device."""
        # Copies to host memory that are under way are not needed any more.
        self._leaving = False
        _bring_back([x for x in self._alive() if x.host and x.memory is None], self._tools)
        self.release()

    def release(self) -> None:
        """Return the host memory. Activations that are only there are lost."""
        if not self._blocks:
            return
        for storage in self._alive():
            storage.host = ()
        self._tools.pool.give_back(self._blocks)
        self._tools.counts.change_in_host(-self._in_host)
        self._blocks, self._in_host = (), 0

    def _begin_backward(self) -> None:
        """Bring the activations back, and those of the layer before while this one computes."""
        if not self._needed:
            self._needed = True
            for layer in (self, self._previous):
                if layer is not None:
                    layer.bring_back()

    def _alive(self) -> list[SavedStorage]:
        return [x for reference in self._storages if (x := reference()) is not None]


def _bring_back(storages: Sequence[SavedStorage], tools: OffloadTools) -> None:
    """Start to copy storages from host memory to new memory on the device."""
    if storages:
        mark = tools.copies.run([pair for storage in storages for pair in storage.copies_back()])
        for storage in storages:
            storage.returns_at(mark)
