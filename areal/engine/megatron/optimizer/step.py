"""The step of Megatron-Core's optimizer, with the clipping, skipping and schedule of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from areal.api.sections.optimizer import OptimizerConfig
from areal.engine.megatron.gradients import expect_param_gather
from areal.engine.megatron.optimizer.main_parameters import present_optimizers
from areal.engine.optimizer import ClippingOptimizer, sum_of_squares
from areal.engine.torch.muon.updates import MatrixUpdates


class MegatronOptimizerStep:
    """Interface of :class:`~areal.engine.optimizer.ClippingOptimizer` to Megatron-Core's optimizer.

    Args:
        chained: Megatron-Core's optimizer.
        chunks: model chunks of this rank.
        device: device of the gradients.
        matrices: updates of matrices by Muon, or ``None``.
    """

    def __init__(
        self,
        chained: ChainedOptimizer,
        chunks: Sequence[DistributedDataParallel],
        device: torch.device,
        matrices: MatrixUpdates | None = None,
    ) -> None:
        self.chained, self.matrices = chained, matrices
        self._chunks, self._device = chunks, device

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.chained.param_groups

    def step(self) -> None:
        """Update the parameters with the gradients prepared by :meth:`global_norm`."""
        expect_param_gather(self._chunks)
        if self.matrices is not None:
            self.matrices.step(each.optimizer for each in present_optimizers(self.chained))
        self.chained.step_with_ready_grads()

    @torch.no_grad()
    def global_norm(self) -> Tensor:
        """Return the L2 norm of the gradients over all ranks. Each element counts once."""
        # Copies gradients to the main parameters.
        self.chained.prepare_grads()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for optimizer in self.chained.chained_optimizers:
            # A rank without parameters of an optimizer still takes part in the all-reduce.
            grads = optimizer.get_main_grads_for_grad_norm() if not optimizer.is_stub_optimizer else []
            squares = sum_of_squares(grads, self._device)
            dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
            total += squares
        return total.sqrt()

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiply all gradients by a factor, in place."""
        for optimizer in present_optimizers(self.chained):
            # A precision-aware optimizer keeps gradients in another attribute.
            grads_or_none = (
                getattr(p, "decoupled_grad", None) if p.grad is None else p.grad for p in optimizer.get_parameters()
            )
            grads = [grad for grad in grads_or_none if grad is not None]
            if grads:
                torch._foreach_mul_(grads, factor)


def step_optimizer(
    chained: ChainedOptimizer,
    chunks: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    total_steps: int | None,
    device: torch.device,
    matrices: MatrixUpdates | None = None,
) -> ClippingOptimizer[MegatronOptimizerStep]:
    """Return the optimizer with clipping and schedule."""
    step = MegatronOptimizerStep(chained, chunks, device, matrices)
    return ClippingOptimizer(step, config, total_steps, global_norm=step.global_norm, scale_grads=step.scale_grads)
