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


@mutant(
    "areal.inference.http.model_check:ModelCheck._check_rounding",
    "unit/inference/http/test_server_models.py::test_server_that_rounds_in_another_way_is_refused[vllm]",
)
def format_of_a_server_is_not_compared(right: Function) -> Function:
    """A trainer and a server that round differently are accepted."""
    return lambda self, served: None


@mutant(
    "areal.recipes.generation.rollouts:_round_as_the_trainer",
    "dist/recipes/test_policy_recipes.py::test_replica_rounds_as_the_trainer[fsdp:d1]",
)
def replica_does_not_round(right: Function) -> Function:
    """Answers come from the model without the rounding of the trainer."""
    return lambda model, engine: None


@mutant(
    "areal.engine.torch.float8.layers:_Float8Linear.__call__",
    "unit/engine/quantization/test_float8_options.py::test_routers_and_excluded_layers_are_left_alone",
)
def float8_layer_without_its_bias(right: Function) -> Function:
    """A converted layer adds no bias."""
    return lambda self, x: self._product(x, self._module.weight)


@mutant(
    "areal.engine.megatron.model.float8:rows_at_once",
    "unit/engine/quantization/test_transformer_engine_recipes.py::test_megatron_core_is_told_the_recipe[mxfp8-e4m3-32]",
)
def rows_of_another_recipe(right: Function) -> Function:
    """Tokens of a rank are padded as for another recipe."""
    return lambda config: min(right(config), 16)
