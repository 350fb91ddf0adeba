"""Bugs of step timings that the suite must catch."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant


@mutant(
    "areal.utils.profiling.phase_timer:TimedCall.read",
    "unit/engine/test_phase_timer.py::test_nested_phase_time_counts_only_for_the_innermost",
)
def reduction_counted_twice(right: Function) -> Function:
    """The time of a reduction is also counted in the backward around it."""

    def wrong(self: Any) -> Any:
        seconds, timings = right(self)
        if {"backward", "reduce"} <= set(timings):
            timings["backward"] += timings["reduce"]
        return seconds, timings

    return wrong


@mutant(
    "areal.engine.fsdp.gradients:time_reductions", "dist/step/test_profile.py::test_phases_sum_to_the_step[fsdp:r2]"
)
def reductions_not_told_apart(right: Function) -> Function:
    """FSDP's reductions within a backward are counted as backward."""
    return lambda model, timer: None
