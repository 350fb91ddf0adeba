"""Products of consecutive groups of rows, on a CPU and on an accelerator, compared with one product for each row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from areal.engine.jax.ahead.devices import planned_devices
from areal.engine.jax.ahead.programs import Programs
from areal.engine.jax.model import experts
from areal.engine.jax.model.expert_weights import ExpertWeight
from areal.engine.jax.model.experts import grouped_linear
from areal.engine.jax.model.token_outputs import compute_outputs
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import config, family_dir

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

        def grouped(x: Array, sums: Array) -> Array:
            return grouped_linear(x, ExpertWeight(weight, sums), jnp.asarray(counts), ())

        actual, pull = jax.vjp(grouped, x, jnp.zeros_like(weight))
        pairs = [(actual, expected), *zip(pull(cotangent), pull_expected(cotangent), strict=True)]
    assert max(float(abs(a - b).max()) for a, b in pairs) < 1e-12


def given(stored: Sequence[Array], sums: Sequence[Array]) -> list[ExpertWeight]:
    """Return weights; without sums, frozen ones."""
    return [ExpertWeight(weight, its) for weight, its in zip_longest(stored, sums)]


PASSES = {"no row": (6, 12, 0), "one pass": (0, 12, 1), "some passes": (0, 6, 2), "all rows": (0, 2, 4)}
"""Experts that tokens choose among, of which the first two are the device's, and the passes that these need."""


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("case", PASSES)
def test_rows_in_passes_are_those_of_one(case: str, trained: bool, platform: None) -> None:
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

        def at_once(x: Array, scores: Array, *sums: Array) -> Array:
            return experts._experts(((), ()), x, chosen, scores, given(weights, sums))

        def in_passes(x: Array, scores: Array, *sums: Array) -> Array:
            return experts._in_passes(rows, ((), ()), x, chosen, scores, given(weights, sums))

        zeros = [jnp.zeros_like(weight) for weight in weights] if trained else []
        (expected, pull_expected), (actual, pull) = (jax.vjp(run, x, scores, *zeros) for run in (at_once, in_passes))
        pairs = [(actual, expected), *zip(pull(cotangent), pull_expected(cotangent), strict=True)]
    assert max(float(abs(a - b).max()) for a, b in pairs) < 1e-12
    assert (float(abs(expected).max()) > 0) == (n_passes > 0)


def test_sums_over_passes_have_the_dtype_of_the_reduction(platform: None) -> None:
    """In bfloat16: gradients are the sums of float32 of the same products, which no pass rounds."""
    tokens, per_token = 512, 2
    keys = jax.random.split(jax.random.key(2), 5)
    chosen = jnp.tile(jnp.arange(per_token), (tokens, 1))
    shapes = ((tokens, IN), (tokens, per_token), (per_token, 2 * OUT, IN), (per_token, IN, OUT))
    x, scores, *weights = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False)
    )

    def gradients(rows: int, dtype: str) -> list[Array]:
        def run(*sums: Array) -> Array:
            stored = [weight.astype(dtype) for weight in weights]
            return experts._in_passes(rows, ((), ()), x, chosen, scores, given(stored, sums))

        return jax.vjp(run, *(jnp.zeros(w.shape, "float32") for w in weights))[1](x)

    for narrow, wide in zip(gradients(64, "bfloat16"), gradients(64, "float32"), strict=True):
        assert narrow.dtype == wide.dtype == jnp.float32
        np.testing.assert_array_equal(narrow, wide)
        assert not np.array_equal(narrow, narrow.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "DEFAULT"), ("float32", "HIGHEST")])
def test_grouped_products_of_bfloat16_do_not_inherit_the_highest_precision(
    dtype: str, precision: str, platform: None
) -> None:
    """A TPU's compiler has no kernel for them: it refuses the program."""
    x, weight, cotangent = (jnp.ones(shape, dtype) for shape in ((8, IN), (2, OUT, IN), (8, OUT)))
    counts = jnp.array([5, 3])

    def pull(x: Array, weight: Array, cotangent: Array) -> tuple[Array, ...]:
        def run(x: Array, sums: Array) -> Array:
            return grouped_linear(x, ExpertWeight(weight, sums), counts, ())

        out, backward = jax.vjp(run, x, jnp.zeros(weight.shape, "float32"))
        return out, *backward(cotangent)

    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(pull)(x, weight, cotangent))
    # The product, and those of both gradients; of a CPU, only those of the accelerators' branch.
    found = re.findall(r"= ragged_dot\w*\[.*?precision=\((.*?), (.*?)\)", text, re.DOTALL)
    assert found == [(f"Precision.{precision}",) * 2] * 3


DTYPES = {
    "defaults": ({}, "f32"),
    "narrow parameters": ({"master_dtype": "bfloat16"}, "f32"),
    "narrow sums": ({"grad_reduce_dtype": "bfloat16"}, "bf16"),
}


def collectives_of_experts(settings: dict[str, str]) -> set[tuple[str, ...]]:
    """Return dtype, shape and name of each collective of a step on two ranks that has all eight experts."""
    path = family_dir("qwen3_moe", hidden_size=64, num_experts=8, num_experts_per_tok=4)
    numbers = {"dtype": "bfloat16", "master_dtype": "float32", "grad_reduce_dtype": "float32", **settings}
    programs = Programs.of(config("jax:d2", path=path, **numbers), planned_devices("cpu:2"), 64)

    def gradients(params: Any, stream: Any, rows: Any) -> Any:
        def total(params: Any) -> Array:
            return compute_outputs(programs.spec, programs.wanted, params, stream, rows)["logprobs"].sum()

        return jax.grad(total)(params)

    with programs.spec.numbers.enabled():
        text = str(jax.make_jaxpr(gradients)(programs.params, *programs.inputs))
    return set(re.findall(r":(\w+)\[8,(\d+),(\d+)\] = (all_gather|reduce_scatter|psum\w*)\[", text))


def compare_collectives() -> None:
    for settings, reduced in DTYPES.values():
        assert collectives_of_experts(settings) == {
            ("bf16", "32", "64", "all_gather"),
            ("bf16", "64", "16", "all_gather"),
            (reduced, "32", "32", "reduce_scatter"),
            (reduced, "64", "8", "reduce_scatter"),
        }


@needs_own_world
def test_experts_are_gathered_in_the_compute_dtype_and_reduced_in_shards() -> None:
    """As dense layers: on two ranks, each gathers the other's half, and gets the sum of its own half."""
    succeed(1, compare_collectives, timeout=240.0)
