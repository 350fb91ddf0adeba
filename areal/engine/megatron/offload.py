"""The buffers of a Megatron-Core model and its optimizer between the device and host memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from areal.engine.megatron import gradients as grad
from areal.utils.offload import HostMemory, optimizer_tensors


class MegatronMemory(HostMemory):
    """Moves whole buffers: parameters and gradients are views of them.

    Args:
        chunks: of this rank. optimizer: over them, or None.
        folder: of :class:`~areal.utils.offload.HostMemory`.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: ChainedOptimizer | None,
        folder: str | None = None,
    ) -> None:
        self._chunks = chunks
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        super().__init__(
            {
                "params": lambda: [p.data for chunk in chunks for p in chunk.parameters()],
                "grads": lambda: [buffer.grad_data for buffer in buffers],
                "optimizer": lambda: _state(optimizer),
            },
            folder,
        )

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        if params:
            grad.settle_parameters(self._chunks)
        super().offload(params=params, grads=grads, optimizer=optimizer)


def _state(optimizer: ChainedOptimizer | None) -> list[Tensor]:
    parts = [] if optimizer is None else [p for p in optimizer.chained_optimizers if not p.is_stub_optimizer]
    moments = [x for part in parts for x in optimizer_tensors(part.optimizer)]
    # Main parameters in bf16 runs; elsewhere they are views of the model's own buffers.
    mains = [
        main
        for part in parts
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        for group in getattr(part, name, [])
        for main in group
        if main is not None
    ]
    return [*moments, *mains]
