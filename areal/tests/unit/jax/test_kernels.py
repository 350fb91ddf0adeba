"""Kernels of TPUs and GPUs, interpreted on a CPU, compared with attention in blocks; and their lowering for both platforms."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, export
from transformers import AutoConfig

from areal.engine.jax.inputs import bucket, walk
from areal.engine.jax.model.architecture import UNLIMITED, Architecture, meta_model
from areal.engine.jax.model.attention import BLOCK, Visibility, attention
from areal.engine.jax.model.fused_attention import Kernel, kernel_attention, kernel_for
from areal.engine.jax.model.products import Numbers
from areal.tests.harness.tiny import family_dir

KERNELS = [Kernel("splash"), Kernel("splash", 100), Kernel("triton")]
IDS = ["splash", "splash-window", "triton"]
NARROW = Numbers("bfloat16", "float32", "float32")


def visibility_of(seqlens: tuple[int, ...]) -> Visibility:
    """Visibility of packed sequences and padding."""
    length = bucket(sum(seqlens))
    made = walk(seqlens, None, length, min(length, BLOCK))
    return Visibility(*(jnp.asarray(made[name]) for name in Visibility._fields))


def heads(visibility: Visibility) -> tuple[Array, Array, Array]:
    """Queries, keys and values of two groups of three heads of 16 numbers."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 3, 16), (2, 16), (2, 16))
    q, k, v = (jax.random.normal(key, (len(visibility.leave), *shape)) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v


def interpreted(kernel: Kernel, visibility: Visibility, q: Array, k: Array, v: Array) -> Array:
    return kernel_attention(Kernel(kernel.name, kernel.window, interpret=True), q, k, v, visibility)


@pytest.mark.parametrize("seqlens", [(40, 80), (300, 17, 200, 100), (700, 300, 20, 500, 400)], ids=len)
@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_kernel_equals_blocks(kernel: Kernel, seqlens: tuple[int, ...]) -> None:
    visibility = visibility_of(seqlens)
    arrays = heads(visibility)
    weight = jax.random.normal(jax.random.key(1), arrays[0].shape)
    window = jnp.int32(kernel.window or UNLIMITED)

    def total(run: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *arrays: (run(*arrays) * weight).sum(), (0, 1, 2)))(*arrays)

    actual = total(partial(interpreted, kernel, visibility))
    expected = total(lambda q, k, v: attention(q, k, v, visibility, window, jnp.int32(0)))
    errors = jax.tree.map(lambda a, b: float(abs(a - b).max() / abs(b).max()), actual, expected)
    assert max(jax.tree.leaves(errors)) < 5e-6, errors


def test_kernel_of_a_tpu_leaves_out_blocks_of_other_sequences() -> None:
    """NaN in a block that is computed would reach the result behind a mask, too, by a product with a weight of zero."""
    visibility = visibility_of((1024, 700, 324))
    q, k, v = heads(visibility)
    grad = jnp.ones(q.shape)

    def run(k: Array, v: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(partial(interpreted, Kernel("splash"), visibility), q, k, v)
        return out, *pull(grad)

    spoiled = [each.at[:1024].set(jnp.nan) for each in (k, v)]
    for name, right, actual in zip(("out", "q", "k", "v"), jax.jit(run)(k, v), jax.jit(run)(*spoiled), strict=True):
        np.testing.assert_array_equal(actual[1024:], right[1024:], err_msg=name)


@pytest.mark.parametrize(("platform", "kernels"), [("tpu", KERNELS[:2]), ("cuda", KERNELS[2:])], ids=["tpu", "cuda"])
def test_kernel_is_lowered_for_its_platform(platform: str, kernels: list[Kernel]) -> None:
    """The forward and the two parts of the backward are kernels of the platform, and no loop of XLA."""
    narrow = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    whole = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    target = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}[platform]
    checks = [export.DisabledSafetyCheck.custom_call(target)]
    for kernel in kernels:
        for length, dim in ((128, 64), (1152, 128)):
            visibility = Visibility(whole((length,)), whole((length,)), whole((length // BLOCK,)))
            arrays = narrow((length, 2, 3, dim)), narrow((length, 2, dim)), narrow((length, 2, dim))

            def run(q: Array, k: Array, v: Array, visibility: Visibility, kernel: Kernel = kernel) -> Any:
                return jax.grad(lambda *x: kernel_attention(kernel, *x, visibility).sum(), (0, 1, 2))(q, k, v)

            with NARROW.enabled():
                exported = export.export(jax.jit(run), platforms=[platform], disabled_checks=checks)
                program = exported(*arrays, visibility).mlir_module()
            assert program.count(f"@{target}") >= 3, (kernel, length)
            assert "stablehlo.while" not in program


def architecture(family: str, **changes: Any) -> Architecture:
    """Architecture of a family with other options."""
    hf = AutoConfig.from_pretrained(family_dir(family))
    for name, value in changes.items():
        setattr(hf, name, value)
    return Architecture.of(meta_model(hf, torch.float32))


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("platform", "family", "changes", "numbers", "cp", "expected"),
    [
        ("tpu", "llama", {}, NARROW, 1, Kernel("splash")),
        ("gpu", "llama", {}, NARROW, 1, Kernel("triton")),
        ("cpu", "llama", {}, NARROW, 1, None),
        ("tpu", "mistral", {"sliding_window": 7}, NARROW, 1, Kernel("splash", 7)),
        ("gpu", "mistral", {"sliding_window": 7}, NARROW, 1, None),
        ("tpu", "qwen3", MIXED, NARROW, 1, None),
        ("tpu", "llama", {}, NARROW, 2, None),
        ("tpu", "llama", {}, Numbers("float32", "float32", "float32"), 1, None),
        ("tpu", "llama", {}, Numbers("bfloat16", "float64", "float64"), 1, None),
    ],
    ids=["tpu", "gpu", "cpu", "tpu-window", "gpu-window", "mixed windows", "context parallel", "float32", "float64"],
)
def test_kernel_is_chosen_by_platform_and_model(
    platform: str, family: str, changes: dict[str, Any], numbers: Numbers, cp: int, expected: Kernel | None
) -> None:
    assert kernel_for(platform, architecture(family, **changes), numbers, cp) == expected
