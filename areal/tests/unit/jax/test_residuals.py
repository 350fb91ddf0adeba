"""What a device keeps between forward and backward, with experts spread over ranks and without. Nothing is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import torch
from jax import ShapeDtypeStruct
from jax.sharding import AbstractMesh

from areal.engine.jax import bridge
from areal.engine.jax.mesh import AXES
from areal.engine.jax.model.architecture import Architecture, meta_model, parameters_of
from areal.engine.jax.model.attention import Visibility
from areal.engine.jax.model.decoder import Stream
from areal.engine.jax.model.products import Numbers
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model.token_outputs import Rows, Wanted
from areal.tests.grid.models import FAMILIES

RANKS, TOKENS = 8, 128


def residual_bytes(dp: int, ep: int) -> int:
    """Return the bytes of residuals on one of ``dp * ep`` devices."""
    hf = meta_model(FAMILIES["qwen3_moe"](num_experts=RANKS), torch.float32)
    mesh = AbstractMesh((1, dp, ep, 1, 1), AXES)
    numbers = Numbers("float32", "float32", "float32")
    spec = ModelSpec(Architecture.of(hf), numbers, mesh, recompute=False, fp32_head=False, keep_bytes=2**30)
    arrays = parameters_of(hf, value_head=False)
    params = {name: ShapeDtypeStruct(info.shape, jnp.float32) for name, info in arrays.items()}
    tokens = ShapeDtypeStruct((dp * ep, TOKENS), jnp.int32)
    visibility = Visibility(tokens, tokens, ShapeDtypeStruct((dp * ep, 1), jnp.int32))
    rows = Rows(tokens, tokens, ShapeDtypeStruct(tokens.shape, jnp.float32))
    wanted = Wanted(frozenset({"logprobs"}), 0)
    forward: Any = bridge._forward
    with numbers.enabled():
        # The function itself, which is traced each time.
        run = partial(forward.__wrapped__, spec, wanted)
        *_, kept = jax.eval_shape(run, params, {}, Stream(tokens, visibility), rows)
    return sum(x.size * x.dtype.itemsize for x in kept.leaves) // (dp * ep)


def test_rank_with_experts_of_others_keeps_its_own_tokens() -> None:
    assert residual_bytes(1, RANKS) <= 1.2 * residual_bytes(RANKS, 1)
