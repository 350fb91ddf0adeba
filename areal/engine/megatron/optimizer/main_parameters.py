"""The parameters that Megatron-Core's optimizers update on this rank: those of the model, copies of them, or ranges."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn


def present_optimizers(chained: ChainedOptimizer | None) -> list[MegatronOptimizer]:
    """Return the optimizers that have parameters on this rank."""
    optimizers = [] if chained is None else chained.chained_optimizers
    return [each for each in optimizers if not getattr(each, "is_stub_optimizer", False)]


def main_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
    """Yield the parameters of the model that an optimizer updates on this rank, what it updates for each, and where that begins.

    The distributed optimizer has a range of each flattened parameter. Without it, bf16 parameters have float32 copies, and the begin is 0. A
    precision-aware optimizer keeps the copies in its state.
    """
    if isinstance(optimizer, DistributedOptimizer):
        copies = optimizer.shard_fp32_from_float16_groups
        if optimizer.config.use_precision_aware_optimizer:
            state = optimizer.optimizer.state
            copies = [[state[shard]["master_param"] for shard in group] for group in optimizer.shard_float16_groups]
        for models, mains in (
            *zip(optimizer.model_float16_groups, copies, strict=True),
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
        ):
            for parameter, main in zip(models, mains, strict=True):
                yield parameter, main, optimizer._get_model_param_range_map(parameter)["param"].start
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            yield from ((parameter, main, 0) for parameter, main in zip(models, mains, strict=True))
        yield from ((parameter, parameter, 0) for group in optimizer.fp32_from_fp32_groups for parameter in group)
    else:
        yield from ((parameter, parameter, 0) for parameter in optimizer.get_parameters())
