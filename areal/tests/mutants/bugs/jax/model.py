"""Bugs in the model of the JAX engine: what a token sees, and the sums of its gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal.tests.mutants.planting import Function, mutant

_BLOCKS = "unit/jax/test_jax_attention.py::test_blocks_equal_attention_with_a_mask[{}]"


@mutant("areal.engine.jax.model.attention:_scores", _BLOCKS.format("packed-window"))
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
