"""Offload of a JAX model: parameters, gradients and optimizer state are moved to host memory or files and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
from jax import Array

from areal.api.memory import EngineMemory, KindMemory
from areal.engine.jax.mesh import distinct_shards, from_boxes, host_view, to_numpy
from areal.engine.jax.model_arrays import ModelState
from areal.engine.jax.optimizer import OptaxOptimizer
from areal.utils.distributed import StateLostError
from areal.utils.dtensor import Box
from areal.utils.offload import FileBackup, backup_folder

Arrays = dict[str, Array]


@dataclass(frozen=True)
class _Kind:
    """Arrays of one kind: how they are read, how they are replaced, and their bytes once all of them exist."""

    get: Callable[[], Arrays]
    put: Callable[[Arrays], None]
    expected: Callable[[], int]


@dataclass(frozen=True)
class _Shard:
    """A shard of an array in host memory, or in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | FileBackup

    @classmethod
    def of(cls, shard: Array, folder: Path | None) -> _Shard:
        """Copy a shard."""
        view = host_view(shard)
        # On a CPU, the view is the memory of the array.
        copied = view.clone() if shard.unsafe_buffer_pointer() == view.data_ptr() else view
        return cls(shard.shape, view.dtype, copied if folder is None else FileBackup(view.untyped_storage(), folder))

    def restore(self) -> torch.Tensor:
        """Return the values."""
        if not isinstance(self.values, FileBackup):
            return self.values
        storage = torch.UntypedStorage(0)
        self.values.restore(storage)
        return torch.empty(0, dtype=self.dtype).set_(storage).view(self.shape)


@dataclass(frozen=True)
class _Backup:
    """This process's shards of an array, each once."""

    shape: tuple[int, ...]
    sharding: Any
    shards: Sequence[tuple[Box, _Shard]]

    @classmethod
    def of(cls, array: Array, folder: Path | None) -> _Backup:
        """Copy the shards of an array."""
        shards = [(box, _Shard.of(shard, folder)) for box, shard in distinct_shards(array)]
        return cls(array.shape, array.sharding, shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.values.nbytes for _, shard in self.shards)

    def restore(self) -> Array:
        """Return the array."""
        return from_boxes(self.shape, self.sharding, [(box, to_numpy(shard.restore())) for box, shard in self.shards])


class JAXMemory:
    """Moves arrays to host memory or files. Implements :class:`areal.engine.components.Memory`.

    Args:
        model: arrays of the model.
        optimizer: optimizer whose arrays are moved, or ``None``.
        folder: directory for files of this rank, instead of host memory. Files are removed after they are restored or discarded.

    Raises:
        ValueError: the directory does not exist or is not writable.
    """

    def __init__(self, model: ModelState, optimizer: OptaxOptimizer | None, folder: str | None = None) -> None:
        self._model = model
        self._folder = None if folder is None else backup_folder(self, folder)
        self._backups: dict[str, dict[str, _Backup]] = {}
        itemsize = jax.numpy.dtype(model.spec.numbers.master).itemsize
        shard_bytes = model.n_local * itemsize
        self._kinds = {
            "params": _Kind(lambda: model.params, model.set_params, lambda: shard_bytes),
            "grads": _Kind(
                lambda: model.grads or {}, model.set_grads, lambda: shard_bytes if model.spec.trained else 0
            ),
        }
        if optimizer is not None:
            sizes = model.local_sizes
            moment_bytes = itemsize * sum(sizes[name] * len(kinds) for name, kinds in optimizer.kinds.items())
            self._kinds["optimizer"] = _Kind(
                lambda: {f"{kind} {name}": x for kind, by in optimizer.moments.items() for name, x in by.items()},
                optimizer.set_moments,
                lambda: moment_bytes,
            )

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Move the named kinds of arrays out. Returns the bytes that were freed."""
        self._require_params()
        self._model.spare.clear()
        freed = 0
        for name in self._named(params, grads, optimizer):
            arrays = self._kinds[name].get()
            if name in self._backups or not arrays:
                continue
            # After an error here, the arrays are still on the device.
            self._backups[name] = {key: _Backup.of(x, self._folder) for key, x in arrays.items()}
            freed += sum(_shard_bytes(x) for x in arrays.values())
            # The references first: nothing may read an array without its memory.
            self._kinds[name].put({})
            for x in arrays.values():
                x.delete()
        return freed

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        """Restore the named kinds of arrays. Returns the bytes that were moved."""
        self._require_params()
        moved = 0
        for name in self._named(params, grads, optimizer):
            backups = self._backups.get(name, {})
            if backups:
                with self._model.spec.numbers.enabled():
                    self._kinds[name].put({key: backup.restore() for key, backup in backups.items()})
                moved += sum(_shard_bytes(x) for x in self._kinds[name].get().values())
                del self._backups[name]
        return moved

    def discard_grads(self) -> None:
        """Discard gradients, on the device or offloaded."""
        self._backups.pop("grads", None)
        self._model.grads = None

    def report(self, device: torch.device) -> EngineMemory:
        """Return the bytes of each kind."""
        kinds = {}
        for name in ("params", "grads", "optimizer"):
            if name not in self._kinds:
                kinds[name] = KindMemory(0, 0, 0)
                continue
            here = sum(_shard_bytes(x) for x in self._kinds[name].get().values())
            away = sum(x.nbytes for x in self._backups.get(name, {}).values())
            # Devices of one process may hold equal shards, of which one is kept elsewhere.
            kinds[name] = KindMemory(here, away, 0 if away else max(self._kinds[name].expected() - here, 0))
        return EngineMemory(**kinds)

    def _require_params(self) -> None:
        """Raise if an interrupted optimizer step has lost the parameters."""
        if not self._model.params and "params" not in self._backups:
            raise StateLostError("the optimizer step was interrupted, and the weights and optimizer state are lost")

    def _named(self, params: bool, grads: bool, optimizer: bool) -> list[str]:
        named = {"params": params, "grads": grads, "optimizer": optimizer}
        return [name for name in self._kinds if named[name]]


def _shard_bytes(array: Array) -> int:
    """Return the bytes of an array on the devices of this process."""
    return sum(shard.data.nbytes for shard in array.addressable_shards)
