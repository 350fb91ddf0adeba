"""Bugs of memory that the suite must catch: of its prediction by plans, and of the advice where it runs out."""

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


@mutant(
    "areal.engine.faults:locate",
    "unit/engine/test_faults_text.py::test_way_out_of_memory_depends_on_the_sequences[seqlens0*]",
)
def one_sequence_is_to_be_cut(right: Function) -> Function:
    """The advice for a micro-batch of one sequence is to lower the budget, which changes nothing."""

    def wrong(error: Exception, mb: Any) -> Exception:
        text = str(right(error, mb))
        return RuntimeError(
            text.replace("shorten the sequence, or choose a larger c", "lower mb_spec.max_tokens_per_mb")
        )

    return wrong
