"""Errors inside of compiled programs and between them, and the engines that are made afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax")

import jax
from jax import Array
from jax.sharding import PartitionSpec

from areal.api import FinetuneSpec
from areal.engine.jax.model import token_outputs
from areal.engine.registry import create_engine
from areal.tests.dist.faults.lost import everywhere, raised
from areal.tests.harness.limits import COMPILING
from areal.tests.harness.tiny import (
    chosen,
    config,
    global_batch,
    local_batch,
    loss,
    programs_that,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import world
from areal.utils.distributed import EngineLostError


def no_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


@contextmanager
def layers_that_fail_on(guilty: int) -> Iterator[None]:
    """Compile models whose layers end with an error on one rank, inside of the program."""
    decode = token_outputs.decode

    def fail(x: np.ndarray) -> np.ndarray:
        if world().rank == guilty:
            raise ArithmeticError("an unlucky kernel")
        return x

    def of_device(x: Array) -> Array:
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def failing(spec: Any, params: Any, stream: Any, *, record: bool = False) -> tuple[Array, Array | None]:
        rows = PartitionSpec("dp")
        run = jax.shard_map(of_device, mesh=spec.mesh, in_specs=rows, out_specs=rows, check_vma=False)
        hidden, experts = decode(spec, params, stream, record=record)
        return run(hidden), experts

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_outputs, "decode", failing)
        yield
    jax.clear_caches()


@pytest.mark.parametrize("backend", chosen("jax:d2", "jax:d1", "jax:t2"))
def test_error_inside_of_a_program(backend: str) -> None:
    """The other rank waits for the gathered weights of the head. The next engine of these processes works."""
    batch = global_batch()
    guilty = world().size - 1
    with started(backend) as engine:
        expected = engine.forward_batch(local_batch(engine, batch))
        with layers_that_fail_on(guilty):
            kind = RuntimeError if world().size == 1 else EngineLostError
            text = raised(lambda: engine.forward_batch(local_batch(engine, batch)), kind, COMPILING)
        assert "an unlucky kernel" in text
        assert world().size == 1 or text.startswith(f"rank {guilty}: ")
        # Alone, a rank goes on with the same engine.
        if world().size == 1:
            assert all(map(torch.equal, engine.forward_batch(batch), expected))
    with started(backend) as successor:
        try:
            actual = successor.forward_batch(local_batch(successor, batch))
        except EngineLostError as error:
            pytest.fail(f"the next engine does not work: {error}")
    assert all(map(torch.equal, actual, expected))
    assert set(everywhere(len(jax.local_devices()))) == {1}


@pytest.mark.world(1, timeout=240)
def test_single_rank_recovers_from_out_of_memory() -> None:
    """In the forward or the backward, also of the second micro-batch."""
    with started("jax:d1") as engine, started("jax:d1") as untouched:
        for name, index in (("_forward", 0), ("_pull", 0), ("_forward", 1), ("_pull", 1)):
            mbs = engine.microbatches(global_batch())
            with programs_that(no_memory, name, on_call=index), pytest.raises(RuntimeError) as caught:
                engine.train_batch(global_batch(), loss)
            assert f"out of memory in micro-batch {index} of {mbs[index].n_tokens} tokens" in str(caught.value)
            with pytest.raises(RuntimeError, match="no gradient is pending"):
                engine.named_gradients()
            actual, expected = engine.train_batch(global_batch(), loss), untouched.train_batch(global_batch(), loss)
            assert (actual.loss, actual.grad_norm) == (expected.loss, expected.grad_norm), name
        assert same_bits(weights_of(engine), weights_of(untouched))


@pytest.mark.world(2)
def test_address_of_the_coordinator_is_checked_also_in_a_world_that_exists() -> None:
    with started("jax:d2"), pytest.raises(ValueError, match=r"jax.coordinator = 'nohost': expected 'host:port'"):
        create_engine(config("jax:d2", jax={"coordinator": "nohost"})).initialize(FinetuneSpec(total_train_steps=1))
