"""Move parameters, gradients and optimizer state of a Megatron-Core model between the device and host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from areal.api.memory import EngineMemory
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
                "optimizer": lambda: _moments(optimizer),
            },
            folder,
            {
                "optimizer": lambda: (
                    expected_optimizer_bytes(optimizer) - sum(x.nbytes for x in _main_parameters(optimizer))
                )
            },
        )
        # Main parameters come back without the moments where they are needed as weights. Their files are in the same directory.
        self._mains = HostMemory({"optimizer": lambda: _main_parameters(optimizer)})
        self._mains._folder = self._folder

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        # A pending gather would write to freed memory.
        if params:
            grad.finish_param_gather(self._chunks)
        freed = super().offload(params=params, grads=grads, optimizer=optimizer)
        return freed + self._mains.offload(params=False, grads=False, optimizer=optimizer)

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> int:
        moved = super().onload(params=params, grads=grads, optimizer=optimizer)
        return moved + self._mains.onload(params=False, grads=False, optimizer=optimizer)

    def onload_main_parameters(self) -> None:
        """Bring back the main parameters, which are the weights of bf16 runs, and leave the moments where they are."""
        self._mains.onload(params=False, grads=False, optimizer=True)

    def report(self, device: torch.device) -> EngineMemory:
        return super().report(device) + self._mains.report(device)


def expected_optimizer_bytes(optimizer: ChainedOptimizer | None) -> int:
    """Return the bytes of the optimizer state after the first step, which creates the moments."""
    states = sum(expected_state_bytes(inner.optimizer) for inner in present_optimizers(optimizer))
    return states + sum(copy.nbytes for copy in _float32_copies(optimizer))


def _moments(optimizer: ChainedOptimizer | None) -> list[Tensor]:
    """Return the optimizer state without the main parameters."""
    mains = {id(main) for main in _main_parameters(optimizer)}
    states = [x for inner in present_optimizers(optimizer) for x in optimizer_tensors(inner.optimizer)]
    return [x for x in states if id(x) not in mains]


def _main_parameters(optimizer: ChainedOptimizer | None) -> list[Tensor]:
    """Return the float32 main parameters of bf16 runs. A precision-aware optimizer has them in its state."""
    states = [state for inner in present_optimizers(optimizer) for state in inner.optimizer.state.values()]
    return [*_float32_copies(optimizer), *(state["master_param"] for state in states if "master_param" in state)]


def _float32_copies(optimizer: ChainedOptimizer | None) -> list[Tensor]:
    """Return the copies that are outside of the optimizer's state. In float32 runs they are views of the model's buffers."""
    return [
        main
        for inner in present_optimizers(optimizer)
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        for group in getattr(inner, name, [])
        for main in group
        if main is not None
    ]
