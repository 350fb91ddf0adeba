"""Bugs of plans of the JAX engine that the suite must catch."""

from __future__ import annotations

from collections.abc import Sequence

from areal.tests.mutants.planting import Function, mutant

STATE = "unit/jax/test_plan_command.py::test_plan_has_the_state_of_a_model"
TEXT = "unit/plan/test_compiled_collectives.py::test_{}"


@mutant("areal.engine.jax.ahead.programs:device_bytes", STATE)
def elements_of_eight_bytes(right: Function) -> Function:
    """Elements of arrays are planned with eight bytes each, whatever their dtype."""
    return lambda arrays: 2 * right(arrays)


@mutant("areal.plan.compiled_collectives:_trips", TEXT.format("shapes_trips_and_groups"))
def loops_of_tpus_run_once(right: Function) -> Function:
    """The number of layers is read where programs for CPUs have it only."""

    def wrong(loop: str, condition: Sequence[str]) -> int:
        return right(loop, ())

    return wrong


@mutant("areal.plan.compiled_collectives:_axes", TEXT.format("step_has_calls_and_bytes_by_axis"))
def collectives_are_of_all_ranks(right: Function) -> Function:
    """Every collective is one of all axes."""
    return lambda groups, mesh: right((), mesh)


@mutant("areal.plan.compiled_collectives:_arrays", TEXT.format("shapes_trips_and_groups"))
def operands_count_as_results(right: Function) -> Function:
    """The operands of an asynchronous collective count as its results."""
    return lambda kind, results, *, started: right(kind, results, started=False)
