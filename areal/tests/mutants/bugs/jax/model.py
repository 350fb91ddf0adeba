"""Bugs in the model of the JAX engine: what a token sees, and the sums of its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal.engine.jax.model.products import linear
from areal.engine.model.classifier import VALUE_BIAS, VALUE_WEIGHT
from areal.tests.mutants.planting import Function, mutant

_BLOCKS = "unit/jax/test_jax_attention.py::test_blocks_equal_attention_with_a_mask[{}]"


@mutant("areal.engine.jax.model.attention:_scores", _BLOCKS.format("packed-window-64"))
def window_off_by_one_in_jax(right: Function) -> Function:
    """A token sees one token more than its window has."""
    return lambda queries, keys, visibility, b, j, window, block: right(
        queries, keys, visibility, b, j, window + 1, block
    )


@mutant("areal.engine.jax.inputs:_walk_tree", "unit/jax/test_inputs.py::test_tokens_of_a_tree_see_their_prefixes_only")
def branches_see_each_other_in_jax(right: Function) -> Function:
    """A token is seen by all that follow it in the family, also those of other branches."""

    def wrong(tree: Any, leave: np.ndarray, positions: np.ndarray, root: np.ndarray) -> None:
        right(tree, leave, positions, root)
        leave[: len(tree)] = leave[root[: len(tree)]]

    return wrong


@mutant(
    "areal.engine.jax.model.fused_attention:_without_other_sequences",
    "unit/jax/test_kernels.py::test_kernel_of_a_tpu_leaves_out_blocks_of_other_sequences",
)
def kernel_visits_all_blocks(right: Function) -> Function:
    """The cost of the kernel follows the square of the stream."""
    return lambda info, first, *, by_queries: info


@mutant(
    "areal.engine.jax.bridge:_pull", "dist/step/test_steps.py::test_three_steps_track_the_reference[sgd-wsd-jax:d1]"
)
def last_micro_batch_only(right: Function) -> Function:
    """The gradient of a micro-batch replaces those before."""
    return lambda *args: right(*args[:-1], jax.tree.map(jnp.zeros_like, args[-1]))


@mutant(
    "areal.engine.jax.model.products:gathered_linear",
    "dist/jax/test_head.py::test_head_in_chunks_is_gathered_and_reduced_once[jax:d2]",
)
def head_reduced_in_each_chunk(right: Function) -> Function:
    """Each chunk of rows gathers the head, and reduces a gradient of its size."""
    return lambda weight, use: lambda x, known: linear(x, weight, use)


@mutant(
    "areal.engine.jax.model.experts:_keeping_own_tokens",
    "unit/jax/test_residuals.py::test_rank_with_experts_of_others_keeps_its_own_tokens",
)
def tokens_of_all_ranks_kept(right: Function) -> Function:
    """A rank with experts of others keeps the activations of the tokens of all of them."""
    return lambda spec, run: run


@mutant(
    "areal.engine.jax.model.architecture:layer_windows",
    "unit/jax/test_jax_architecture.py::test_window_is_read_as_the_family_reads_it[llama-*]",
)
def window_of_a_family_without_one_in_jax(right: Function) -> Function:
    """A window in the configuration counts in every family."""
    return lambda config: (config.sliding_window,) * config.num_hidden_layers


@mutant(
    "areal.engine.jax.model.token_outputs:_values",
    "unit/jax/test_jax_head_dtypes.py::test_gradients_of_a_value_head_are_not_summed_in_bfloat16",
)
def bias_of_values_summed_in_the_compute_dtype(right: Function) -> Function:
    """The gradient of the value head's bias is summed over tokens in bfloat16."""

    def wrong(spec: Any, params: Any, hidden: jax.Array) -> jax.Array:
        weight = params[VALUE_WEIGHT]
        values = linear(hidden, weight, spec.use(VALUE_WEIGHT, weight.shape))
        return (values + params[VALUE_BIAS].astype(values.dtype))[..., 0].astype(spec.numbers.stats)

    return wrong
