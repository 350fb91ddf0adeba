"""Bugs in the settings of the JAX engine on a CPU: the size of blocks, and memory between forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from areal.engine.jax.model.token_outputs import compute_outputs
from areal.tests.mutants.planting import Function, mutant

_RESIDUALS = "unit/jax/test_residuals.py::{}"


@mutant(
    "areal.engine.jax.model.decoder:checkpoint_name",
    _RESIDUALS.format("test_layer_on_a_cpu_keeps_results_of_products_only"),
)
def projections_computed_again(right: Function) -> Function:
    """No result of a linear layer is kept for the backward."""
    return lambda x, name: x


@mutant("areal.engine.jax.bridge:_evaluate", _RESIDUALS.format("test_evaluation_keeps_no_logits"))
def logits_kept_without_a_backward(right: Function) -> Function:
    """An evaluation has the logits of all tokens in memory, as a step does for its backward."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def wrong(spec: Any, wanted: Any, *arguments: Any) -> Any:
        return compute_outputs(spec, wanted, *arguments)

    return wrong


@mutant(
    "areal.engine.jax.spare:SpareResiduals.give",
    _RESIDUALS.format("test_next_micro_batch_takes_the_memory_of_residuals"),
)
def residuals_in_new_memory(right: Function) -> Function:
    """Memory of residuals is freed after each micro-batch."""
    return lambda self, arrays: None


@mutant(
    "areal.engine.jax.model.products:_summed_over_rows",
    _RESIDUALS.format("test_products_of_a_backward_on_a_cpu_are_left_to_the_fast_library"),
)
def transposition_left_to_xla(right: Function) -> Function:
    """The rows of both operands are multiplied as they are."""
    return lambda order, x, grad, use: jnp.einsum(order.replace("it,", "ti,"), x, grad)


@mutant(
    "areal.engine.jax.model.attention:_scores",
    "unit/jax/test_jax_attention.py::test_blocks_equal_attention_with_a_mask[packed-full-64]",
)
def queries_in_blocks_of_another_size(right: Function) -> Function:
    """The places of tokens are those of blocks of 128 on a CPU, too."""
    return lambda queries, keys, visibility, b, j, window, block: right(
        queries, keys, visibility, b // 2, j // 2, window, block
    )
