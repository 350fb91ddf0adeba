"""Bugs of plans that the suite must catch."""

from __future__ import annotations

from dataclasses import replace

from areal.tests.mutants.planting import Function, mutant

PLAN = "unit/plan/test_plan.py::"


@mutant("areal.plan.trace:Trace.plus", PLAN + "test_few_layers_tell_the_costs_of_all[fsdp:d2t2]")
def one_layer_is_left_out(right: Function) -> Function:
    """The extrapolation misses the last layer."""
    return lambda self, other, factor: right(self, other, factor - 1)


@mutant(
    "areal.plan.hardware:Hardware.collective_seconds",
    PLAN + "test_collectives_of_parameters_overlap_and_others_do_not",
)
def every_collective_stays_on_a_node(right: Function) -> Function:
    """Collectives over several nodes take as long as on one."""

    def wrong(self, name: str, nbytes: float, size: int, stride: int) -> float:  # type: ignore[no-untyped-def]
        return right(replace(self, network_gbps=self.node_gbps), name, nbytes, size, stride)

    return wrong


@mutant("areal.plan.engines.fsdp:PlannedEngine.optimizer_bytes", PLAN + "test_state_is_two_moments_of_the_parameters")
def one_moment(right: Function) -> Function:
    """AdamW is planned with one moment instead of two."""
    return lambda self: right(self) // 2


@mutant(
    "areal.plan.layout_plan:traced_stages",
    PLAN + "test_earliest_stage_with_most_layers_is_traced[*p8-*]",
)
def stages_with_extra_layers_are_left_out(right: Function) -> Function:
    """The first, the middle and the last stage are traced, and none with more layers."""
    return lambda config: sorted({0, config.dims.pp // 2, config.dims.pp - 1})


@mutant(
    "areal.plan.uniform_layers:UniformLayers._grad_sync",
    "unit/plan/test_layout_search.py::test_few_layers_reduce_gradients_as_all_do",
)
def few_layers_choose_when_gradients_are_reduced(right: Function) -> Function:
    """Of the models with one and two layers, each chooses by its own size when gradients are reduced."""
    return lambda self, request: request.config.grad_sync
