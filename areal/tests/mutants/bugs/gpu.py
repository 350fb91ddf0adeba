"""Bugs of paths that only a GPU takes, which the suite must catch on a CPU with stand-ins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import nn

from areal.tests.mutants.planting import Function, mutant

ADAM = "dist/megatron/test_megatron_transformer_engine.py::"
PLACEMENT = "unit/gpu/test_gpu_of_each_rank.py::"
LATENT = "dist/megatron/test_megatron_latent.py::"


def megatron_mutant(target: str, *tests: str) -> Callable[[Callable[[Function], Function]], None]:
    """Register a bug of the Megatron engine, if that is installed."""
    return mutant(target, *tests) if find_spec("megatron") is not None else lambda mutate: None


# ---- placement


@mutant(
    "areal.utils.rank_gpus:place", PLACEMENT + "test_ranks_share_a_gpu_only_where_its_uuid_is_the_same[one GPU each]"
)
def visible_gpus_are_counted(right: Function) -> Function:
    """Ranks share a GPU wherever there are more ranks than visible GPUs."""

    def wrong(ranks: Any, rank: int) -> Any:
        placement = right(ranks, rank)
        few = len(ranks) > len(ranks[rank].uuids)
        return dataclasses.replace(placement, backend="gloo" if few else placement.backend)

    return wrong


@mutant(
    "areal.utils.rank_gpus:choose_gpus",
    PLACEMENT + "test_ranks_share_a_gpu_only_where_its_uuid_is_the_same[all GPUs, no LOCAL_RANK]",
)
def first_gpu_without_local_rank(right: Function) -> Function:
    """All ranks without LOCAL_RANK use the first GPU that they see."""

    def wrong(ranks: Any) -> list[int]:
        return [0 if seen.local_rank is None else at for seen, at in zip(ranks, right(ranks), strict=True)]

    return wrong


# ---- benchmarks


@mutant("benchmarks.gpu.device:kernel_spans", "unit/gpu/test_idle_time.py::test_annotations_are_not_kernels")
def annotations_count_as_kernels(right: Function) -> Function:
    """A phase that is marked in the profile counts as one kernel, which covers the gaps within it."""

    def wrong(events: Any) -> list[tuple[float, float]]:
        return [(event.time_range.start, event.time_range.end) for event in events if event.device_type.name == "CUDA"]

    return wrong


# ---- CPU offload


@mutant(
    "areal.engine.torch.random_init:materialize",
    "unit/gpu/test_cpu_offload.py::test_buffers_are_on_the_device_that_computes[files-deepseek_v3]",
)
def buffers_follow_parameters(right: Function) -> Function:
    """With CPU offload, buffers are in host memory like the parameters."""
    return lambda model, device, buffer_device: right(model, device, device)


# ---- Transformer Engine


@megatron_mutant("areal.engine.megatron.dist_checkpoint:set_step", ADAM + "test_fused_adam_resumes_bitwise[d1]")
def fused_adam_begins_anew(right: Function) -> Function:
    """A loaded optimizer that keeps its step in the parameter group begins its bias correction anew."""

    def wrong(optimizers: Any, step: int) -> None:
        right(optimizers, step)
        for optimizer in optimizers:
            for group in optimizer.optimizer.param_groups:
                group.pop("step", None)

    return wrong


@megatron_mutant(
    "areal.engine.megatron.weight_mapping:_mark_split",
    LATENT + "test_gradient_norm_counts_replicated_weights_once[w2]",
)
def marks_of_layers_are_kept(right: Function) -> Function:
    """A replicated weight that its layer marks as split is counted on each tensor-parallel rank."""

    def wrong(parameter: nn.Parameter, split: int | None) -> None:
        if not hasattr(parameter, "tensor_model_parallel"):
            right(parameter, split)

    return wrong


@megatron_mutant(
    "areal.engine.megatron.weights:_main_parameters",
    ADAM + "test_main_parameters_are_float32_with_moments_of_any_dtype[w2-bfloat16-float32 moments]",
)
def main_parameters_start_anywhere(right: Function) -> Function:
    """Main parameters that a precision-aware optimizer keeps are not filled with the weights of the model."""

    def wrong(optimizer: Any) -> Any:
        copies = {parameter: (main.clone(), start) for parameter, (main, start) in right(optimizer).items()}
        inners = optimizer.chained_optimizers if optimizer is not None else []
        return copies if any(inner.config.use_precision_aware_optimizer for inner in inners) else right(optimizer)

    return wrong


@megatron_mutant(
    "areal.engine.megatron.weights:MegatronWeights.fill",
    ADAM + "test_weights_load_after_a_step_with_bf16_moments[w2-dcp]",
)
def old_main_parameters_are_kept(right: Function) -> Function:
    """Loading weights leaves the main parameters of a precision-aware optimizer as they were."""

    def wrong(self: Any, fill: Any) -> None:
        mains, self._mains = self._mains, {}
        right(self, fill)
        self._mains = mains

    return wrong


@megatron_mutant(
    "areal.engine.megatron.model.config:_mixture_of_experts", ADAM + "test_adapters_on_experts_use_local_layers[w1]"
)
def legacy_experts_under_adapters(right: Function) -> Function:
    """With Transformer Engine, the local layers of adapters get Megatron-Core's legacy experts."""
    return lambda hf, *, local: right(hf, local=False)
