"""Move parameters, gradients and optimizer state of a sharded model between the device and host memory."""

from __future__ import annotations

import torch
from torch import nn

from areal.utils.dtensor import reshard
from areal.utils.offload import HostMemory, expected_state_bytes, optimizer_tensors, storage_bytes


class ShardedOffload(HostMemory):
    """Offloads the shards of a model.

    Args:
        model: sharded model with resharded parameters. Its shards are recorded here, because in a gathered module
            ``model.parameters()`` are not the shards and do not hold their gradients.
        optimizer: optimizer whose state is moved, or ``None``.
        folder: directory for offloaded tensors, see :class:`~areal.utils.offload.HostMemory`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | None = None) -> None:
        self._model = model
        self._shards = list(model.parameters())
        # FSDP pads gradients as it pads shards. Without an optimizer, a backward adds gradients all the same.
        grads_bytes = storage_bytes(shard for shard in self._shards if shard.requires_grad)
        super().__init__(
            {
                "params": lambda: self._shards,
                "grads": lambda: [shard.grad for shard in self._shards if shard.grad is not None],
                "optimizer": lambda: [] if optimizer is None else optimizer_tensors(optimizer),
            },
            folder,
            {
                "grads": lambda: grads_bytes,
                "optimizer": lambda: 0 if optimizer is None else expected_state_bytes(optimizer),
            },
        )

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        # Gathered weights would keep device memory and become stale.
        if params:
            reshard(self._model)
        return super().offload(params=params, grads=grads, optimizer=optimizer)

    def discard_grads(self) -> None:
        """Discard pending gradients, on the device or offloaded."""
        self.forget("grads")
        for shard in self._shards:
            shard.grad = None
