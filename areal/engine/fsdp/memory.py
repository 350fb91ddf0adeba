"""Parameters, gradients and optimizer state between the device and host memory, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal.engine.fsdp.shards import reshard


class HostOffload:
    """Copies storages to host memory and frees them in place, so that every view of them stays valid once they are back.

    Args:
        model: sharded and at rest. Its shards are noted now: while a module is gathered, ``model.parameters()`` are not the
            shards, and have not their gradients.
        optimizer: whose state is moved, or None.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._shards = list(model.parameters())
        self._optimizer = optimizer
        self._away: dict[str, list[tuple[torch.UntypedStorage, torch.UntypedStorage]]] = {}

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Move what is named; what is away already stays there."""
        if params:
            reshard(self._model)
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted and kind not in self._away:
                self._away[kind] = [_send_away(storage) for storage in _storages(self._tensors(kind))]

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        """Bring back what is named; what is here already stays."""
        for kind, wanted in (("params", params), ("grads", grads), ("optimizer", optimizer)):
            if wanted:
                for storage, copy in self._away.pop(kind, []):
                    storage.resize_(copy.nbytes())
                    storage.copy_(copy)

    def discard_grads(self) -> None:
        """Forget pending gradients, here or away."""
        self._away.pop("grads", None)
        for shard in self._shards:
            shard.grad = None

    def _tensors(self, kind: str) -> Iterable[Tensor]:
        if kind == "params":
            return self._shards
        if kind == "grads":
            return [shard.grad for shard in self._shards if shard.grad is not None]
        if self._optimizer is None:
            return []
        return [
            x for state in self._optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()
        ]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    unique = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in local if x.untyped_storage().nbytes()}
    return list(unique.values())


def _send_away(storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, torch.UntypedStorage]:
    copy = storage.cpu() if storage.device.type != "cpu" else storage.clone()
    storage.resize_(0)
    return storage, copy
