"""Bugs of the memory of plans that the suite must catch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

MEASURED = "unit/plan/test_measured_memory.py::test_bytes_are_those_of_a_step"


@mutant("areal.engine.attention.kernels:runs_varlen", f"{MEASURED}[selective]")
def planned_attention_keeps_its_weights(right: Function) -> Function:
    """A plan in float32 keeps a score for each pair of tokens, which no kernel of a GPU does."""
    return lambda device, dtype, head_dim: dtype.itemsize == 2 and right(device, dtype, head_dim)


@mutant("areal.plan.step_recorder:StepRecorder._sort", f"{MEASURED}[full]")
def gathered_parameters_take_no_memory(right: Function) -> Function:
    """Parameters that FSDP gathers are not counted."""
    return lambda self, parameters: None


@mutant("areal.plan.step_recorder:StepRecorder._set", f"{MEASURED}[none]")
def logits_are_activations(right: Function) -> Function:
    """Logits of the head are counted as activations."""

    def wrong(self: Any, tensor: Tensor, kind: str) -> None:
        right(self, tensor, "activations" if kind == "logits" else kind)

    return wrong
