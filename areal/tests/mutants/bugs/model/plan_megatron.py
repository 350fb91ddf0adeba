"""Bugs of plans of the Megatron engine that the suite must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from areal.api import TrainEngineConfig
from areal.api.parallel import ParallelDims
from areal.plan.layout_search import PlanJob
from areal.plan.step_recorder import StepRecorder
from areal.tests.mutants.planting import Function, mutant

PLAN = "unit/plan/test_plan.py::test_{}"
GLOO = "dist/plan/test_against_gloo.py::test_plan_is_the_step_of_four_ranks[*{}]"
MEASURED = "unit/plan/test_measured_memory.py::test_bytes_are_those_of_a_step[megatron]"
ENGINE = "areal.plan.engines.megatron:PlannedMegatronEngine."


@mutant(ENGINE + "held_bytes", MEASURED, GLOO.format("Megatron's data"))
def buffers_of_gradients_are_released(right: Function) -> Function:
    """The buffers of gradients are left out, as if they were released after a step."""
    return lambda self: {**right(self), "gradients": 0}


@mutant(ENGINE + "_optimizer_bytes", GLOO.format("Megatron's data"))
def main_parameters_are_left_out(right: Function) -> Function:
    """The optimizer of a bfloat16 run is planned without its float32 main parameters."""
    return lambda self: right(self) * 2 // 3


@mutant(ENGINE + "watch", MEASURED)
def views_of_parameters_are_activations(right: Function) -> Function:
    """Views of parameters, such as transposed weights, count as activations."""

    def wrong(self: Any, recorder: StepRecorder) -> None:
        return None

    return wrong


@mutant("areal.plan.layout_plan:waiting", PLAN.format("collectives_of_buffers_overlap_only_if_they_are_set_to"))
def every_reduction_overlaps(right: Function) -> Function:
    """Megatron-Core's reductions and gathers are planned to overlap, whatever the settings."""

    def wrong(config: TrainEngineConfig) -> frozenset[str]:
        return frozenset()

    return wrong


@mutant(
    "areal.plan.step_recorder:StepRecorder._count",
    PLAN.format("collectives_of_buffers_overlap_only_if_they_are_set_to"),
)
def buffers_are_any_tensors(right: Function) -> Function:
    """Collectives of Megatron-Core's buffers have the axis of their group: they are not known to carry parameters or gradients."""
    return lambda self, name, group, nbytes, *, of_buffers=False: right(self, name, group, nbytes)


@mutant("areal.plan.engines.megatron:_spread_tokens", PLAN.format("experts_of_megatron_get_equally_many_tokens"))
def experts_get_the_tokens_of_one_rank(right: Function) -> Function:
    """A rank's experts get only the tokens of one rank."""

    def wrong(dispatcher: Any, count: Callable[[Tensor], Tensor], routing_map: Tensor) -> Tensor:
        tokens: Tensor = right(dispatcher, count, routing_map)
        if dispatcher.ep_size == 1:
            return tokens
        for name in ("output_splits", "output_splits_tp", "num_global_tokens_per_local_expert"):
            setattr(dispatcher, name, getattr(dispatcher, name) // dispatcher.ep_size)
        return tokens // dispatcher.ep_size

    return wrong


@mutant("areal.plan.layout_search:layouts", PLAN.format("search_of_megatron_leaves_out_what_it_refuses"))
def megatron_has_replicas(right: Function) -> Function:
    """The search of Megatron layouts has groups of replicas."""

    def wrong(job: PlanJob, backend: str, world_size: int) -> Iterator[ParallelDims]:
        return (replace(dims, backend=backend) for dims in right(job, "fsdp", world_size))

    return wrong
