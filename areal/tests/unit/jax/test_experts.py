"""Products of consecutive groups of rows, on a CPU and on an accelerator, compared with one product for each row."""

from __future__ import annotations

import functools
import re

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from areal.engine.jax.model import experts
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


PASSES = {"no row": (6, 12, 0), "one pass": (0, 12, 1), "some passes": (0, 6, 2), "all rows": (0, 2, 4)}
"""Experts that tokens choose among, of which the first two are the device's, and the passes that these need."""


@pytest.mark.parametrize("reduce", ["float64", None])
@pytest.mark.parametrize("case", PASSES)
def test_rows_in_passes_are_those_of_one(case: str, reduce: str | None, platform: None) -> None:
    low, high, n_passes = PASSES[case]
    tokens, per_token, device_experts = 40, 2, 2
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(1), 6)
        chosen = jnp.argsort(jax.random.uniform(keys[0], (tokens, high - low)))[:, :per_token] + low
        shapes = ((tokens, IN), (tokens, per_token), (device_experts, 2 * OUT, IN), (device_experts, IN, OUT))
        x, scores, *weights = (jax.random.normal(key, shape) for key, shape in zip(keys[1:], shapes, strict=False))
        cotangent = jax.random.normal(keys[5], x.shape)
        rows = chosen.size // 4
        assert experts._passes(rows, chosen, device_experts)[0] == n_passes

        def at_once(x: Array, scores: Array, *weights: Array) -> Array:
            return experts._experts(reduce, x, chosen, scores, *weights)

        def in_passes(x: Array, scores: Array, *weights: Array) -> Array:
            return experts._in_passes(rows, reduce, x, chosen, scores, *weights)

        (expected, pull_expected), (actual, pull) = (jax.vjp(run, x, scores, *weights) for run in (at_once, in_passes))
        pairs = [(actual, expected), *zip(pull(cotangent), pull_expected(cotangent), strict=True)]
    assert max(float(abs(a - b).max()) for a, b in pairs) < 1e-12
    assert (float(abs(expected).max()) > 0) == (n_passes > 0)


def test_sums_over_passes_have_the_dtype_of_the_reduction(platform: None) -> None:
    """Parameters in bfloat16: each gradient is rounded once, not after each pass."""
    tokens, per_token = 512, 2
    keys = jax.random.split(jax.random.key(2), 5)
    chosen = jnp.tile(jnp.arange(per_token), (tokens, 1))
    shapes = ((tokens, IN), (tokens, per_token), (per_token, 2 * OUT, IN), (per_token, IN, OUT))
    x, scores, *weights = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False)
    )

    def gradients(rows: int, dtype: str) -> list[Array]:
        run = functools.partial(experts._in_passes, rows, "float32", x, chosen, scores)
        return jax.vjp(run, *(w.astype(dtype) for w in weights))[1](x)

    for narrow, wide in zip(gradients(64, "bfloat16"), gradients(64, "float32"), strict=True):
        np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


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
