"""Megatron-Core's optimizer, distributed or not, behind the clipping, skipping and schedule of all engines."""

from __future__ import annotations

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
    """Whether parameters are gathered while the next forward runs."""
    return config.megatron.overlap_param_gather and distributed(config)


def distributed(config: TrainEngineConfig) -> bool:
    """Whether optimizer state is sharded over data-parallel ranks. Megatron-Core's distributed optimizer has neither float64 nor SGD."""
    is_adam = config.optimizer is None or config.optimizer.type == "adamw"
    return config.megatron.distributed_optimizer and config.dtype != "float64" and is_adam


def megatron_optimizer(
    chunks: list[DistributedDataParallel],
    settings: OptimizerConfig,
    config: TrainEngineConfig,
    groups: ProcessGroupCollection,
) -> ChainedOptimizer:
    """Megatron-Core's optimizer over these chunks: AdamW or SGD, with float32 main parameters. Collective over the world.

    Raises:
        ValueError: ``optimizer_state_dtype`` needs Transformer Engine, which is not installed.
    """
    options: dict[str, Any] = {}
    if config.megatron.optimizer_state_dtype != "float32":
        if not has_transformer_engine():
            raise ValueError(
                f"megatron.optimizer_state_dtype = {config.megatron.optimizer_state_dtype!r}: it needs Transformer Engine on a GPU, which is "
                "not there; leave it out"
            )
        state = torch_dtype(config.megatron.optimizer_state_dtype)
        options = {"use_precision_aware_optimizer": True, "exp_avg_dtype": state, "exp_avg_sq_dtype": state}
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
    return optimizer


class MegatronOptimizerStep:
    """What :class:`~areal.engine.optimizer.ClippingOptimizer` needs of Megatron-Core's optimizer.

    Args:
        chained: Megatron-Core's. device: of the gradients.
    """

    def __init__(self, chained: ChainedOptimizer, device: torch.device) -> None:
        self.chained = chained
        self._device = device

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.chained.param_groups

    def step(self) -> None:
        """Update with gradients that :meth:`global_norm` made ready."""
        self.chained.step_with_ready_grads()

    @torch.no_grad()
    def global_norm(self) -> Tensor:
        """L2 norm of the gradients over all ranks, each element counted once."""
        self.chained.prepare_grads()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for optimizer in self._parts():
            grads = optimizer.get_main_grads_for_grad_norm() if not optimizer.is_stub_optimizer else []
            squares = sum_of_squares(grads, self._device)
            dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
            total += squares
        return total.sqrt()

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiply every gradient in place."""
        for optimizer in self._parts():
            parameters = [] if optimizer.is_stub_optimizer else optimizer.get_parameters()
            found = (getattr(p, "decoupled_grad", None) if p.grad is None else p.grad for p in parameters)
            grads = [grad for grad in found if grad is not None]
            if grads:
                torch._foreach_mul_(grads, factor)

    def _parts(self) -> list[MegatronOptimizer]:
        return self.chained.chained_optimizers


def step_optimizer(
    chained: ChainedOptimizer, config: OptimizerConfig, total_steps: int, device: torch.device
) -> ClippingOptimizer[MegatronOptimizerStep]:
    """The optimizer as an engine holds it."""
    step = MegatronOptimizerStep(chained, device)
    return ClippingOptimizer(step, config, total_steps, global_norm=step.global_norm, scale_grads=step.scale_grads)
