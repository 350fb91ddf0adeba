"""Attention in blocks, compared with attention under a mask: outputs and gradients in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from areal.api import MicroBatchSpec
from areal.engine.jax.inputs import bucket, walk
from areal.engine.jax.model.attention import BLOCK, Visibility, attention, block_on
from areal.utils.data import plan_batch


def dense(q: Array, k: Array, v: Array, made: dict[str, np.ndarray], window: int) -> Array:
    """Attention with all scores and a mask."""
    places = np.arange(len(q))
    distance = made["positions"][:, None] - made["positions"]
    sees = (places <= places[:, None]) & (places[:, None] < made["leave"]) & (distance < window)
    scores = jnp.einsum("qngd,knd->ngqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("ngqk,knd->qngd", jax.nn.softmax(jnp.where(sees, scores, -jnp.inf)), v)


def families() -> list[dict[str, torch.Tensor]]:
    """Four groups of samples with common prefixes, some longer than a block."""
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(0, 50, (n,), generator=generator)

    prompts = [ids(n) for n in (150, 20, 40, 1)]
    return [{"input_ids": torch.cat([prompt, ids(n)])} for prompt in prompts for n in (3, 60, 25)]


@pytest.mark.parametrize("block", [BLOCK, block_on("cpu")])
@pytest.mark.parametrize("window", [2**30, 20], ids=["full", "window"])
@pytest.mark.parametrize("shared", [False, True], ids=["packed", "tree"])
def test_blocks_equal_attention_with_a_mask(shared: bool, window: int, block: int) -> None:
    plan = plan_batch(families(), MicroBatchSpec(share_prefixes=shared))
    (tree,) = plan.trees if shared else (None,)
    lengths = [len(families()[i]["input_ids"]) for i in plan.bins[0]]
    made = walk(lengths, tree, bucket(sum(lengths) if tree is None else len(tree)), block)
    tokens = len(made["leave"])
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        q = jax.random.normal(keys[0], (tokens, 2, 3, 8), "float64")
        k, v = (jax.random.normal(key, (tokens, 2, 8), "float64") for key in keys[1:3])
        weight = jax.random.normal(keys[3], q.shape, "float64")
        visibility = Visibility(*(jnp.asarray(made[name]) for name in Visibility._fields))

        def total(run: object) -> object:
            return jax.jit(jax.value_and_grad(lambda q, k, v: (run(q, k, v) * weight).sum(), (0, 1, 2)))(q, k, v)

        actual = total(lambda q, k, v: attention(q, k, v, visibility, jnp.int32(window), jnp.int32(0)))
        expected = total(lambda q, k, v: dense(q, k, v, made, window))
        errors = jax.tree.map(lambda a, b: float(abs(a - b).max() / abs(b).max()), actual, expected)
    assert max(jax.tree.leaves(errors)) < 1e-13, errors
