"""Logits of a bfloat16 model: products of the head are not rounded, nor are the sums of their gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.sharding import Mesh
from torch import Tensor

from areal.engine.jax.mesh import AXES, to_numpy
from areal.engine.jax.model import token_outputs
from areal.engine.jax.model.architecture import HEAD, Architecture, meta_model
from areal.engine.jax.model.products import Numbers, linear
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model.token_outputs import Rows, Wanted
from areal.engine.model.classifier import VALUE_BIAS, VALUE_WEIGHT
from areal.tests.grid.models import FAMILIES
from areal.tests.unit.logprobs.head_cases import H, V, make, reference, relative, scalar

TOKENS, RANK = 16, 2
WANTED = Wanted(frozenset({"logprobs", "entropy"}), 4)
FLOATS = ("logprobs", "entropy", "topk")


def spec_of(**options: Any) -> ModelSpec:
    arch = Architecture.of(meta_model(FAMILIES["llama"](), torch.float32))
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1, 1, 1, 1), AXES)
    numbers = Numbers("bfloat16", "float32", "float32")
    return ModelSpec(arch, numbers, mesh, recompute=False, **{"fp32_head": False, "keep_bytes": 0} | options)


def to_tensor(x: Array) -> Tensor:
    return torch.tensor(np.asarray(x[0], np.float64))


def with_adapter(weight: Tensor) -> tuple[dict[str, Array], Tensor]:
    """Return factors of an adapter of the head, whose first product is exact in bfloat16, and the weight with its update."""
    up = torch.randn(V, RANK, generator=torch.Generator().manual_seed(3)).bfloat16()
    arrays = {"lm_head.lora_A": jnp.eye(RANK, H)[None, None], "lm_head.lora_B": jnp.asarray(up.float())[None, :, None]}
    return arrays, weight.detach().double() + up.double() @ torch.eye(RANK, H, dtype=torch.float64)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kept", [0, 2**20])
@pytest.mark.parametrize("adapter", [False, True])
def test_bf16_logits_are_not_rounded(adapter: bool, kept: int, trained: bool) -> None:
    """In chunks, kept for the backward, and as full logits, as on the torch engines."""
    hidden, weight, _, targets, temperature = make(torch.bfloat16, tokens=TOKENS)
    spec = spec_of(keep_bytes=kept, trained=trained)
    arrays, updated = with_adapter(weight) if adapter else ({}, weight)
    params = arrays | {HEAD: jnp.asarray(weight.detach().float())}
    states = jnp.asarray(to_numpy(hidden))[None]
    rows = Rows(*(jnp.asarray(to_numpy(x))[None] for x in (targets.int(), targets.int(), temperature.float())))
    with spec.numbers.enabled(), mock.patch.object(token_outputs, "_CHUNK", TOKENS // 2):
        found = token_outputs._of_head(spec, WANTED, params, states, rows, None)
        head, use = token_outputs._head(spec, params)
        logits = token_outputs._logits(spec, params, linear(states, head, use), states, rows.temperature, None)
    want = reference(hidden, updated, targets, temperature=temperature, entropy=True, topk=4)
    errors = {name: relative(to_tensor(found[name]), want[name]) for name in FLOATS}
    exact = hidden.double() @ updated.double().t() / temperature[:, None]
    assert max(errors.values()) <= 5e-6, errors
    assert logits.dtype == jnp.float32
    assert relative(to_tensor(logits), exact) <= 5e-6


@pytest.mark.parametrize("kept", [0, 2**20])
@pytest.mark.parametrize(("fp32", "tolerance"), [(False, 8e-3), (True, 1e-5)])
def test_bf16_operands_give_the_gradients(fp32: bool, tolerance: float, kept: int) -> None:
    """The gradient of the logits is rounded once, unless ``fp32_head``. All sums are float32."""
    hidden, weight, _, targets, temperature = make(torch.bfloat16, tokens=TOKENS)
    spec = spec_of(keep_bytes=kept, fp32_head=fp32)
    rows = Rows(*(jnp.asarray(to_numpy(x))[None] for x in (targets.int(), targets.int(), temperature.float())))

    def objective(states: Array, head: Array) -> Array:
        out = token_outputs._of_head(spec, WANTED, {HEAD: head}, states, rows, None)
        factors = (jnp.sin(jnp.arange(out[name].size) + i) for i, name in enumerate(FLOATS))
        terms = [(out[name].reshape(-1) * each).sum() for name, each in zip(FLOATS, factors, strict=True)]
        return jnp.stack(terms).sum()

    with spec.numbers.enabled(), mock.patch.object(token_outputs, "_CHUNK", TOKENS // 2):
        given = jnp.asarray(to_numpy(hidden))[None], jnp.asarray(weight.detach().float())
        of_hidden, of_weight = jax.jit(jax.grad(objective, (0, 1)))(*given)
    leaves = [hidden, weight.detach().double().requires_grad_()]
    outputs = reference(hidden, leaves[1], targets, temperature=temperature, entropy=True, topk=4)
    want = torch.autograd.grad(scalar(outputs), leaves)
    assert of_hidden.dtype == jnp.bfloat16
    assert relative(to_tensor(of_hidden), want[0]) <= max(tolerance, 2.0**-8)
    assert relative(to_tensor(of_weight[None]), want[1]) <= tolerance


def test_gradients_of_a_value_head_are_not_summed_in_bfloat16() -> None:
    """A sum of ones in bfloat16 ends at 256, or at 8,192 by blocks."""
    spec, tokens = spec_of(), 2**15
    params = {VALUE_WEIGHT: jnp.ones((1, H)), VALUE_BIAS: jnp.zeros(1)}
    hidden = jnp.ones((1, tokens, H), jnp.bfloat16)
    with spec.numbers.enabled():
        found = jax.jit(jax.grad(lambda params: token_outputs._values(spec, params, hidden).sum()))(params)
    assert found[VALUE_BIAS].tolist() == [tokens]
    assert found[VALUE_WEIGHT].tolist() == [[tokens] * H]
