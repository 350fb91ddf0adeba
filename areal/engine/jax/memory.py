"""Offload of a JAX model: parameters, gradients and optimizer state are moved to host memory and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import Array

from areal.api.memory import EngineMemory, KindMemory
from areal.engine.jax.optimizer import OptaxOptimizer
from areal.engine.jax.state import ModelState

Arrays = dict[str, Array]


@dataclass(frozen=True)
class _Kind:
    """Arrays of one kind: how they are read, how they are replaced, and their bytes once all of them exist."""

    get: Callable[[], Arrays]
    put: Callable[[Arrays], None]
    expected: Callable[[], int]


@dataclass(frozen=True)
class _OnHost:
    """An array in host memory: this rank's shards, in the order of its devices."""

    shape: tuple[int, ...]
    sharding: Any
    shards: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


class JAXMemory:
    """Moves arrays to host memory. Implements :class:`areal.engine.components.Memory`."""

    def __init__(self, model: ModelState, optimizer: OptaxOptimizer | None) -> None:
        self._model = model
        self._held: dict[str, dict[str, _OnHost]] = {}
        shard_bytes = model.n_local * jax.numpy.dtype(model.spec.numbers.master).itemsize
        self._kinds = {
            "params": _Kind(lambda: model.params, model.set_params, lambda: shard_bytes),
            "grads": _Kind(lambda: model.grads or {}, model.set_grads, lambda: shard_bytes),
        }
        if optimizer is not None:
            n_moments = len(optimizer.kinds)
            self._kinds["optimizer"] = _Kind(
                lambda: {f"{kind} {name}": x for kind, by in optimizer.moments.items() for name, x in by.items()},
                optimizer.set_moments,
                lambda: n_moments * shard_bytes,
            )

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Move the named kinds of arrays out. Returns the bytes that were freed."""
        freed = 0
        for name in self._named(params, grads, optimizer):
            arrays = self._kinds[name].get()
            if name in self._held or not arrays:
                continue
            self._held[name] = {key: _take(x) for key, x in arrays.items()}
            freed += sum(held.nbytes for held in self._held[name].values())
            # The references first: nothing may read an array without its memory.
            self._kinds[name].put({})
            for x in arrays.values():
                x.delete()
        return freed

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Restore the named kinds of arrays. Returns the bytes that were moved."""
        moved = 0
        for name in self._named(params, grads, optimizer):
            held = self._held.pop(name, {})
            if held:
                with self._model.spec.numbers.enabled():
                    self._kinds[name].put({key: _put(x) for key, x in held.items()})
                moved += sum(x.nbytes for x in held.values())
        return moved

    def discard_grads(self) -> None:
        """Discard gradients, on the device or offloaded."""
        self._held.pop("grads", None)
        self._model.grads = None

    def report(self, device: torch.device) -> EngineMemory:
        """Return the bytes of each kind."""
        kinds = {}
        for name in ("params", "grads", "optimizer"):
            if name not in self._kinds:
                kinds[name] = KindMemory(0, 0, 0)
                continue
            here = sum(shard.data.nbytes for x in self._kinds[name].get().values() for shard in x.addressable_shards)
            away = sum(x.nbytes for x in self._held.get(name, {}).values())
            kinds[name] = KindMemory(here, away, max(self._kinds[name].expected() - here - away, 0))
        return EngineMemory(**kinds)

    def _named(self, params: bool, grads: bool, optimizer: bool) -> list[str]:
        named = {"params": params, "grads": grads, "optimizer": optimizer}
        return [name for name in self._kinds if named[name]]


def _take(array: Array) -> _OnHost:
    return _OnHost(array.shape, array.sharding, [np.array(shard.data) for shard in array.addressable_shards])


def _put(held: _OnHost) -> Array:
    devices = list(held.sharding.addressable_devices_indices_map(held.shape))
    shards = [jax.device_put(values, device) for values, device in zip(held.shards, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(held.shape, held.sharding, shards)
