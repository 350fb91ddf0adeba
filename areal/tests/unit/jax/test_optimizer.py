"""Optimizers of the JAX engine on parameters in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh

from areal.api import OptimizerConfig
from areal.engine.jax.mesh import AXES
from areal.engine.jax.model.architecture import Architecture, ParameterInfo, meta_model
from areal.engine.jax.model.products import Numbers
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model_arrays import ModelState, scale_grads
from areal.engine.jax.optimizer import OptaxOptimizer
from areal.tests.grid.models import FAMILIES

SHAPES = {"model.norm.weight": (16,), "model.layers.*.mlp.up_proj.weight": (2, 8, 16)}


def model_with_gradients(master: str) -> ModelState:
    """Return parameters and gradients that have no more digits than bfloat16."""
    arch = Architecture.of(meta_model(FAMILIES["llama"](), torch.float32))
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1, 1, 1, 1), AXES)
    spec = ModelSpec(arch, Numbers("bfloat16", master, master), mesh, recompute=False, fp32_head=False, keep_bytes=0)
    model = ModelState(spec, {name: ParameterInfo(shape, (name,), False) for name, shape in SHAPES.items()})
    params, grads = (
        {name: jax.random.normal(key, shape, jnp.bfloat16).astype(master) for name, shape in SHAPES.items()}
        for key in jax.random.split(jax.random.key(0))
    )
    model.set_params(params)
    model.set_grads(grads)
    return model


def assert_rounded_once(narrow: Mapping[str, jax.Array], wide: Mapping[str, jax.Array]) -> None:
    """Check that arrays in bfloat16 are those in float32, rounded."""
    assert {x.dtype for x in narrow.values()} == {jnp.dtype("bfloat16")}
    for name, expected in wide.items():
        np.testing.assert_array_equal(narrow[name], expected.astype(jnp.bfloat16), err_msg=name)


@pytest.mark.parametrize("settings", [{}, {"type": "sgd", "momentum": 0.9}, {"type": "muon"}], ids=str)
def test_parameters_in_bfloat16_are_updated_in_float32(settings: dict[str, Any]) -> None:
    def stepped(master: str) -> dict[str, jax.Array]:
        model = model_with_gradients(master)
        optimizer = OptaxOptimizer(model, OptimizerConfig(lr=0.011, weight_decay=0.1, **settings))
        optimizer.step()
        moments = {f"{kind} {name}": x for kind, own in optimizer.moments.items() for name, x in own.items()}
        return model.params | moments

    assert_rounded_once(stepped("bfloat16"), stepped("float32"))


def test_clipping_factor_of_gradients_in_bfloat16_is_not_rounded() -> None:
    def scaled(master: str) -> dict[str, jax.Array]:
        model = model_with_gradients(master)
        scale_grads(model, 0.3001)
        return model.require_grads()

    assert_rounded_once(scaled("bfloat16"), scaled("float32"))
