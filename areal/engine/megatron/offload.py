"""Move parameters, gradients and optimizer state of a Megatron-Core model between the device and host memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from areal.engine.megatron import gradients as grad
from areal.engine.megatron.optimizer.main_parameters import present_optimizers
from areal.utils.offload import HostMemory, expected_state_bytes, optimizer_tensors


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
            {"optimizer": lambda: expected_optimizer_bytes(optimizer)},
        )

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        # A pending gather would write to freed memory.
        if params:
            grad.finish_param_gather(self._chunks)
        return super().offload(params=params, grads=grads, optimizer=optimizer)


def _optimizer_state_tensors(optimizer: ChainedOptimizer | None) -> list[Tensor]:
    moments = [x for inner in present_optimizers(optimizer) for x in optimizer_tensors(inner.optimizer)]
    return [*moments, *_main_parameters(optimizer)]


def expected_optimizer_bytes(optimizer: ChainedOptimizer | None) -> int:
    """Return the bytes of the optimizer state after the first step, which creates the moments."""
    moments = sum(expected_state_bytes(inner.optimizer) for inner in present_optimizers(optimizer))
    return moments + sum(main.nbytes for main in _main_parameters(optimizer))


def _main_parameters(optimizer: ChainedOptimizer | None) -> list[Tensor]:
    """Return the float32 main parameters of bf16 runs. In other runs they are views of the model's buffers."""
    return [
        main
        for inner in present_optimizers(optimizer)
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        for group in getattr(inner, name, [])
        for main in group
        if main is not None
    ]
