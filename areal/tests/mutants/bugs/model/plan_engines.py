"""Bugs of plans of adapters and of further engines that the suite must catch."""

from __future__ import annotations

from typing import Any

from areal.plan.uniform_layers import UniformLayers
from areal.tests.mutants.planting import Function, mutant

ADAPTERS = "unit/plan/test_plan.py::test_{}"


@mutant(
    "areal.plan.engines.fsdp:PlannedEngine.optimizer_bytes",
    ADAPTERS.format("adapters_are_what_is_trained"),
    "dist/plan/test_against_gloo.py::test_plan_is_the_step_of_four_ranks[*adapters]",
)
def adapters_have_the_state_of_the_model(right: Function) -> Function:
    """The optimizer of an engine with adapters is planned as that of the full model."""
    return lambda self: 2 * self.parameter_bytes()


@mutant(
    "areal.plan.step_recorder:StepRecorder.watch",
    "unit/plan/test_measured_memory.py::test_bytes_are_those_of_a_step[adapters]",
)
def factors_of_adapters_count_twice(right: Function) -> Function:
    """The recorder does not know the factors of adapters: views of them count as activations."""
    return lambda self, model, factors=(): right(self, model)


@mutant("areal.plan.layout_search:PlanJob.uniform_layers", ADAPTERS.format("few_layers_tell_the_costs_of_adapters"))
def pattern_of_adapters_is_extrapolated(right: Function) -> Function:
    """Adapters of some layers are planned from models of few layers."""

    def wrong(self: Any) -> UniformLayers | None:
        return UniformLayers.of(self.model)

    return wrong


@mutant(
    "areal.plan.step_recorder:_group_by_name",
    "unit/plan/test_step_recorder.py::test_collectives_of_named_groups_are_counted",
)
def collectives_of_dtensor_are_left_out(right: Function) -> Function:
    """Of the collectives that name their group, only the engine's own are counted."""
    return lambda func, args, kwargs: right(func, args, kwargs) if func.namespace == "areal" else None
