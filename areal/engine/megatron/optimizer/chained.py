"""Megatron-Core's optimizer, distributed or not."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.api.sections.optimizer import OptimizerConfig
from areal.engine.megatron.model.layer_spec import has_transformer_engine
from areal.engine.megatron.optimizer.main_parameters import present_optimizers


def overlaps_gather(config: TrainEngineConfig) -> bool:
    """Return whether parameters are gathered during the next forward."""
    return config.megatron.overlap_param_gather and distributed(config)


def distributed(config: TrainEngineConfig) -> bool:
    """Return whether optimizer state is sharded over data-parallel ranks.

    Megatron-Core's distributed optimizer supports neither float64 nor SGD.
    """
    is_sgd = config.optimizer is not None and config.optimizer.type == "sgd"
    return config.megatron.distributed_optimizer and config.dtype != "float64" and not is_sgd


def megatron_optimizer(
    chunks: list[DistributedDataParallel],
    settings: OptimizerConfig,
    config: TrainEngineConfig,
    groups: ProcessGroupCollection,
) -> ChainedOptimizer:
    """Return Megatron-Core's optimizer over the chunks: AdamW, also beside Muon, or SGD, with float32 main parameters.

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
                optimizer="sgd" if settings.type == "sgd" else "adam",
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
    for optimizer in present_optimizers(chained):
        inner: Any = optimizer.optimizer
        accepted = inspect.signature(inner.initialize_state).parameters
        arguments = {"store_param_remainders": False} if "store_param_remainders" in accepted else {}
        for parameter in optimizer.get_parameters():
            inner.initialize_state(parameter, **arguments)
