"""Planted bugs in the rounding of operands."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

STEP = "dist/parallel/test_quantization.py::test_step_is_that_of_a_rounded_reference[{}]"


@mutant("areal.engine.torch.quantization.formats:_largest", STEP.format("qwen3-fsdp:d1-fp8"))
def scale_of_the_wrong_axis(right: Function) -> Function:
    """A scale belongs to an input instead of an output, and to all tokens of a micro-batch."""
    return lambda x, dims: right(x, (0,) if dims == (-1,) and x.dim() == 2 else dims)


@mutant("areal.engine.torch.quantization.layers:_StraightThrough.backward", STEP.format("qwen3-fsdp:d1-int4"))
def gradient_of_the_rounding(right: Function) -> Function:
    """The gradient flows through the rounding, which is constant almost everywhere."""
    return lambda ctx, *grads: (grads[0] * 0, None)


@mutant(
    "areal.engine.torch.quantization.layers:_RoundedInputs.__torch_function__", STEP.format("qwen3_moe-fsdp:d1-fp8")
)
def inputs_of_experts_are_not_rounded(right: Function) -> Function:
    """Experts round their weights alone."""

    def wrong(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    return wrong
