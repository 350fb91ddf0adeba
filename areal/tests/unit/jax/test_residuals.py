"""Residuals of a device between forward and backward: their bytes, with experts spread over ranks and without, and their memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import ShapeDtypeStruct
from jax.sharding import AbstractMesh, Mesh

from areal.api import MicroBatchSpec
from areal.engine.jax import bridge
from areal.engine.jax.ahead.devices import planned_devices
from areal.engine.jax.ahead.programs import LOGPROBS, Programs
from areal.engine.jax.mesh import AXES
from areal.engine.jax.model.architecture import Architecture, meta_model, parameters_of
from areal.engine.jax.model.attention import Visibility
from areal.engine.jax.model.decoder import Stream
from areal.engine.jax.model.products import Numbers
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model.token_outputs import Rows, Wanted
from areal.tests.grid.models import FAMILIES
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import config, family_dir, global_batch, loss, started

RANKS, TOKENS = 8, 128


def residual_bytes(dp: int, ep: int) -> int:
    """Return the bytes of residuals on one of ``dp * ep`` devices."""
    return sum(x.size * x.dtype.itemsize for x in residuals(dp, ep)[1]) // (dp * ep)


def residuals(dp: int, ep: int, *, trained: bool = True) -> tuple[Any, list[Any]]:
    """Return a model of experts, and what its forward on ``dp * ep`` devices keeps for the backward."""
    hf = meta_model(FAMILIES["qwen3_moe"](num_experts=RANKS), torch.float32)
    mesh = AbstractMesh((1, dp, ep, 1, 1), AXES)
    numbers = Numbers("float32", "float32", "float32")
    options: dict[str, Any] = {"recompute": False, "fp32_head": False, "keep_bytes": 2**30, "trained": trained}
    spec = ModelSpec(Architecture.of(hf), numbers, mesh, **options)
    arrays = parameters_of(hf, value_head=False)
    params = {name: ShapeDtypeStruct(info.shape, jnp.float32) for name, info in arrays.items()}
    tokens = ShapeDtypeStruct((dp * ep, TOKENS), jnp.int32)
    visibility = Visibility(tokens, tokens, ShapeDtypeStruct((dp * ep, 1), jnp.int32))
    rows = Rows(tokens, tokens, ShapeDtypeStruct(tokens.shape, jnp.float32))
    wanted = Wanted(frozenset({"logprobs"}), 0)
    forward: Any = bridge._differentiate
    with numbers.enabled():
        # The function itself, which is traced each time.
        run = partial(forward.__wrapped__, spec, wanted)
        *_, kept = jax.eval_shape(run, params, {}, Stream(tokens, visibility), rows)
    return hf, kept.leaves


def one_cpu(vocab: int = 64, tokens: int = TOKENS) -> Programs:
    """Return the programs of a dense model on one CPU."""
    hf = meta_model(FAMILIES["qwen3"](vocab_size=vocab), torch.float32)
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1, 1, 1, 1), AXES)
    numbers = Numbers("float32", "float32", "float32")
    spec = ModelSpec(Architecture.of(hf), numbers, mesh, recompute=False, fp32_head=False, keep_bytes=2**30)
    return Programs(spec, parameters_of(hf, value_head=False), tokens)


def test_layer_on_a_cpu_keeps_results_of_products_only() -> None:
    """A layer keeps its input, queries, keys, values, attention, its projection, gate and up, and no function of them."""
    programs = one_cpu()
    spec, params = programs.spec, programs.params
    forward: Any = bridge._differentiate
    with spec.numbers.enabled():
        run = partial(forward.__wrapped__, spec, LOGPROBS)
        *_, kept = jax.eval_shape(run, params, {}, *programs.inputs)
    arch, shape = spec.arch, {name: x.shape for name, x in params.items()}
    hidden, wide = shape["model.norm.weight"][0], shape["model.layers.*.mlp.up_proj.weight"][1]
    # Attention has a log-sum-exp for each head in addition.
    width = 2 * hidden + arch.head_dim * (2 * arch.n_heads + 2 * arch.n_kv_heads) + arch.n_heads + 2 * wide
    rows = [x for x in kept.leaves if x.shape[0] == arch.n_layers and x.size > arch.n_layers]
    assert sum(x.size for x in rows) == arch.n_layers * TOKENS * width


def test_evaluation_keeps_no_logits() -> None:
    """The backward of a step reads the logits of all tokens. Without one, they are computed in chunks of 512 and dropped."""
    vocab, tokens = 96, 1024
    programs = one_cpu(vocab, tokens)
    with programs.spec.numbers.enabled():
        run = partial(bridge._evaluate, programs.spec, LOGPROBS)
        program = str(jax.make_jaxpr(run)(programs.params, *programs.inputs))
    assert f"512,{vocab}]" in program
    assert f"{tokens},{vocab}]" not in program


def test_rank_with_experts_of_others_keeps_its_own_tokens() -> None:
    """It computes its experts again, and keeps less than a rank with all experts: 0.67 of it, and 0.95 with the tokens of all ranks."""
    assert residual_bytes(1, RANKS) <= 0.75 * residual_bytes(RANKS, 1)


@pytest.mark.parametrize("trained", [True, False])
def test_no_weight_of_experts_is_kept_for_the_backward(trained: bool) -> None:
    """The program has them as arguments: kept ones would be a copy for each micro-batch."""
    hf, leaves = residuals(1, 1, trained=trained)
    shapes = {info.shape for info in parameters_of(hf, value_head=False).values() if len(info.shape) == 4}
    assert len(shapes) == 2  # [L, E, out, in]
    assert not shapes & {leaf.shape for leaf in leaves}


def compare_temporaries() -> None:
    """Compare the memory of programs between their inputs and results, with experts spread over four devices and without."""
    path = family_dir("qwen3_moe", hidden_size=64, num_experts=8, num_experts_per_tok=4)
    devices = planned_devices("cpu:4")
    found: dict[str, list[int]] = {}
    for backend in ("jax:d4", "jax:e4"):
        programs = Programs.of(config(backend, path=path), devices, 512).forward_and_backward()[:2]
        found[backend] = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert all(own <= 1.5 * alone for own, alone in zip(found["jax:e4"], found["jax:d4"], strict=True)), found


@needs_own_world
def test_rank_with_experts_of_others_computes_as_many_rows_at_a_time_as_its_own() -> None:
    succeed(1, compare_temporaries, timeout=240.0)


def addresses(arrays: Sequence[jax.Array]) -> dict[int, int]:
    """Return the sizes of arrays by their addresses."""
    return {x.unsafe_buffer_pointer(): x.nbytes for x in arrays}


def test_next_micro_batch_takes_the_memory_of_residuals() -> None:
    calls: list[tuple[dict[int, int], dict[int, int]]] = []
    forward = bridge._forward

    def recorded(*arguments: Any) -> Any:
        given = addresses(arguments[-1])
        results = forward(*arguments)
        calls.append((given, addresses(results[-1].leaves)))
        return results

    with mock.patch.object(bridge, "_forward", recorded), started("jax:d1", mb_spec=MicroBatchSpec()) as engine:
        for _ in range(2):
            engine.train_batch(global_batch(), loss)
        kept = sum(x.nbytes for x in jax.live_arrays())
        engine.offload()
        gc.collect()
        left = sum(x.nbytes for x in jax.live_arrays())
    (_, first), (given, second) = calls
    assert given == first
    # JAX may write an output of the same shape to one of them.
    assert sum(second[each] for each in second.keys() & given.keys()) > 0.95 * sum(second.values())
    assert left < 0.01 * kept, (left, kept)


def test_products_of_a_backward_on_a_cpu_are_left_to_the_fast_library() -> None:
    """XLA does not fuse a product over the rows of both operands, and runs it at a third of the rate."""
    jax.clear_caches()  # an earlier trace has its products
    _, backward, _ = one_cpu(vocab=512, tokens=1024).forward_and_backward()  # two chunks of logits
    products = [line for line in backward.as_text().splitlines() if " dot(" in line]
    slow = [line for line in products if "lhs_contracting_dims={0}" in line]
    assert len(products) > 10
    assert not slow, slow
