"""Move parameters, gradients and optimizer state of a Megatron-Core model between the device and host memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from areal.engine.megatron import gradients as grad
from areal.utils.offload import HostMemory, optimizer_tensors


class MegatronOffload(HostMemory):
    """Offloads the buffers of a Megatron model, of which parameters and gradients are views.

    Args:
        chunks: model chunks of this rank.
        optimizer: optimizer over the chunks, or ``None``.
        folder: directory for offloaded tensors, see :class:`~areal.utils.offload.HostMemory`.
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
                "optimizer": lambda: _optimizer_state_tensors(optimizer),
            },
            folder,
        )

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        # A pending gather would write to freed memory.
        if params:
            grad.finish_param_gather(self._chunks)
        return super().offload(params=params, grads=grads, optimizer=optimizer)


def _optimizer_state_tensors(optimizer: ChainedOptimizer | None) -> list[Tensor]:
    optimizers = [] if optimizer is None else [p for p in optimizer.chained_optimizers if not p.is_stub_optimizer]
    moments = [x for inner in optimizers for x in optimizer_tensors(inner.optimizer)]
    # In bf16 runs also main parameters; otherwise they are views of the model's buffers.
    mains = [
        main
        for inner in optimizers
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        for group in getattr(inner, name, [])
        for main in group
        if main is not None
    ]
    return [*moments, *mains]
