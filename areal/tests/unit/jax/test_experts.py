"""Products of consecutive groups of rows, on a CPU and on an accelerator, compared with one product for each row."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from areal.engine.jax.model.experts import grouped_linear

ROWS, EXPERTS, IN, OUT = 215, 6, 7, 5
COUNTS = {
    "empty groups": [3, 0, 70, 129, 0, 5],
    "whole blocks": [64, 0, 0, 0, 0, 128],
    "one group": [0, 215, 0, 0, 0, 0],
    "no row": [0, 0, 0, 0, 0, 0],
}


@pytest.fixture(params=["cpu", "accelerator"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of each platform, computed here."""
    if request.param == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))


@pytest.mark.parametrize("case", COUNTS)
def test_groups_of_rows_have_their_own_weights(case: str, platform: None) -> None:
    counts = np.array(COUNTS[case], np.int32)
    owners = np.repeat(np.arange(EXPERTS), counts)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 3)
        x, cotangent = jax.random.normal(keys[0], (ROWS, IN)), jax.random.normal(keys[1], (ROWS, OUT))
        weight = jax.random.normal(keys[2], (EXPERTS, OUT, IN))

        def by_rows(x: Array, weight: Array) -> Array:
            out = jnp.einsum("ni,noi->no", x[: len(owners)], weight[owners])
            return jnp.concatenate([out, jnp.zeros((ROWS - len(owners), OUT))])

        expected, pull_expected = jax.vjp(by_rows, x, weight)
        actual, pull = jax.vjp(lambda x, weight: grouped_linear(x, weight, jnp.asarray(counts), "float64"), x, weight)
        pairs = [(actual, expected), *zip(pull(cotangent), pull_expected(cotangent), strict=True)]
    assert max(float(abs(a - b).max()) for a, b in pairs) < 1e-12


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "DEFAULT"), ("float32", "HIGHEST")])
def test_grouped_products_of_bfloat16_do_not_inherit_the_highest_precision(
    dtype: str, precision: str, platform: None
) -> None:
    """A TPU's compiler has no kernel for them: it refuses the program."""
    x, weight, cotangent = (jnp.ones(shape, dtype) for shape in ((8, IN), (2, OUT, IN), (8, OUT)))
    counts = jnp.array([5, 3])

    def pull(x: Array, weight: Array, cotangent: Array) -> tuple[Array, ...]:
        out, backward = jax.vjp(lambda x, weight: grouped_linear(x, weight, counts, "float32"), x, weight)
        return out, *backward(cotangent)

    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(pull)(x, weight, cotangent))
    # The product, and those of both gradients; of a CPU, only those of the accelerators' branch.
    found = re.findall(r"= ragged_dot\w*\[.*?precision=\((.*?), (.*?)\)", text, re.DOTALL)
    assert found == [(f"Precision.{precision}",) * 2] * 3
