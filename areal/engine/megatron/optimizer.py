"""Megatron-Core's optimizer, distributed or not, with the clipping, skipping and schedule of all engines."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from areal.api.config import OptimizerConfig, TrainEngineConfig, torch_dtype
from areal.engine.megatron.model.layer_spec import has_transformer_engine
from areal.engine.optimizer import ClippingOptimizer, sum_of_squares


def overlaps_gather(config: TrainEngineConfig) -> bool:
    """Return whether parameters are gathered during the next forward."""
    return config.megatron.overlap_param_gather and distributed(config)


def distributed(config: TrainEngineConfig) -> bool:
    """Return whether optimizer state is sharded over data-parallel ranks.

    Megatron-Core's distributed optimizer supports neither float64 nor SGD.
    """
    is_adam = config.optimizer is None or config.optimizer.type == "adamw"
    return config.megatron.distributed_optimizer and config.dtype != "float64" and is_adam


def megatron_optimizer(
    chunks: list[DistributedDataParallel],
    settings: OptimizerConfig,
    config: TrainEngineConfig,
    groups: ProcessGroupCollection,
) -> ChainedOptimizer:
    """Return Megatron-Core's optimizer over the chunks: AdamW or SGD, with float32 main parameters.

    Collective over all ranks.

    Raises:
        ValueError: ``optimizer_state_dtype`` needs Transformer Engine, which is not installed.
    """
    options: dict[str, Any] = {}
    # Moments in a narrower dtype need the precision-aware optimizer.
    if config.megatron.optimizer_state_dtype != "float32":
        if not has_transformer_engine():
            raise ValueError(
                f"megatron.optimizer_state_dtype = {config.megatron.optimizer_state_dtype!r}: it needs Transformer Engine on a GPU, which is "
                "not there; leave it out"
            )
        state = torch_dtype(config.megatron.optimizer_state_dtype)
        options = {"use_precision_aware_optimizer": True, "exp_avg_dtype": state, "exp_avg_sq_dtype": state}
        # By default it stores only the 16 bits that bf16 parameters lack, which no other optimizer could load.
        options["store_param_remainders"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam" if settings.type == "adamw" else "sgd",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                sgd_momentum=settings.momentum,
                bf16=config.dtype == "bfloat16",
                params_dtype=torch_dtype(config.dtype),
                clip_grad=0.0,
                use_distributed_optimizer=distributed(config),
                overlap_param_gather=overlaps_gather(config),
                **options,
            ),
            list(chunks),
            config_overrides={},  # every parameter decays, as on the other engines
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
    if options:
        _create_precision_aware_state(optimizer)
    return optimizer


def _create_precision_aware_state(chained: ChainedOptimizer) -> None:
    """Create the state of Transformer Engine's precision-aware optimizer, with its main parameters.

    Megatron-Core would create it in the first step. Its ``init_state_fn`` does not pass the argument that
    Transformer Engine has required since release 2.1.
    """
    for optimizer in chained.chained_optimizers:
        if optimizer.is_stub_optimizer:
            continue
        inner: Any = optimizer.optimizer
        accepted = inspect.signature(inner.initialize_state).parameters
        arguments = {"store_param_remainders": False} if "store_param_remainders" in accepted else {}
        for parameter in optimizer.get_parameters():
            inner.initialize_state(parameter, **arguments)


class MegatronOptimizerStep:
    """Interface of :class:`~areal.engine.optimizer.ClippingOptimizer` to Megatron-Core's optimizer.

    Args:
        chained: Megatron-Core's optimizer.
        device: device of the gradients.
    """

    def __init__(self, chained: ChainedOptimizer, device: torch.device) -> None:
        self.chained = chained
        self._device = device

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.chained.param_groups

    def step(self) -> None:
        """Update the parameters with the gradients prepared by :meth:`global_norm`."""
        self.chained.step_with_ready_grads()

    @torch.no_grad()
    def global_norm(self) -> Tensor:
        """Return the L2 norm of the gradients over all ranks. Each element counts once."""
        # Copies gradients to the main parameters.
        self.chained.prepare_grads()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for optimizer in self._optimizers():
            # A rank without parameters of an optimizer still takes part in the all-reduce.
            grads = optimizer.get_main_grads_for_grad_norm() if not optimizer.is_stub_optimizer else []
            squares = sum_of_squares(grads, self._device)
            dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
            total += squares
        return total.sqrt()

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiply all gradients by a factor, in place."""
        for optimizer in self._optimizers():
            parameters = [] if optimizer.is_stub_optimizer else optimizer.get_parameters()
            # A precision-aware optimizer keeps gradients in another attribute.
            grads_or_none = (getattr(p, "decoupled_grad", None) if p.grad is None else p.grad for p in parameters)
            grads = [grad for grad in grads_or_none if grad is not None]
            if grads:
                torch._foreach_mul_(grads, factor)

    def _optimizers(self) -> list[MegatronOptimizer]:
        return self.chained.chained_optimizers


def step_optimizer(
    chained: ChainedOptimizer, config: OptimizerConfig, total_steps: int | None, device: torch.device
) -> ClippingOptimizer[MegatronOptimizerStep]:
    """Return the optimizer with clipping and schedule."""
    step = MegatronOptimizerStep(chained, device)
    return ClippingOptimizer(step, config, total_steps, global_norm=step.global_norm, scale_grads=step.scale_grads)
