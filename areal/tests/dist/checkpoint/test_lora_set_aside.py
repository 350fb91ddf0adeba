"""Gradients of an adapter that are aside during a call, and entries of the caller in the manifest of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal.api import Batch, LoRAConfig, TokenOutputs
from areal.engine.checkpoint.atomic_dir import read_manifest
from areal.tests.grid.layouts import LORA
from areal.tests.harness.tiny import global_batch, gradients_of, local_batch, loss, same_bits, started

LAYOUTS = [
    pytest.param("fsdp:d1", marks=pytest.mark.world(1)),
    pytest.param("megatron:d1", marks=pytest.mark.world(1)),
    pytest.param("fsdp:d2", marks=pytest.mark.world(2)),
    pytest.param("fsdp:t2", marks=[pytest.mark.world(2), pytest.mark.thorough]),
    pytest.param("fsdp:p2", marks=[pytest.mark.world(2), pytest.mark.thorough]),
    pytest.param("megatron:t2", marks=[pytest.mark.world(2), pytest.mark.thorough]),
    pytest.param("megatron:p2", marks=[pytest.mark.world(2), pytest.mark.thorough]),
]


def failing(outputs: TokenOutputs, batch: Batch) -> Tensor:
    raise ValueError("a bad loss")


@pytest.mark.parametrize("backend", LAYOUTS)
def test_gradients_that_are_aside_survive_a_failing_call(backend: str) -> None:
    """Reduced or not: they are the same to the bit, and those of a call in between are added."""
    with started(backend, lora=LORA) as engine:
        batches = [local_batch(engine, global_batch(seed)) for seed in range(2)]
        expected = []
        for batch in batches:
            engine.forward_backward(batch, loss)
            expected.append(gradients_of(engine))
            engine.zero_grad()
        for reduced in (False, True):
            engine.forward_backward(batches[0], loss)
            if reduced:
                gradients_of(engine)
            engine.adapters.set_aside("default")
            with pytest.raises(RuntimeError, match="no gradient is pending"):
                engine.optimizer_step()
            with pytest.raises(ValueError, match="a bad loss"):
                engine.forward_backward(batches[1], failing)
            engine.adapters.put_back("default")
            assert same_bits(gradients_of(engine), expected[0])

            # Once more, although nothing was put back in between.
            engine.adapters.set_aside("default")
            engine.adapters.set_aside("default")
            engine.forward_backward(batches[1], loss)
            engine.adapters.put_back("default")
            engine.adapters.put_back("default")
            for name, gradient in gradients_of(engine).items():
                wanted = expected[0][name] + expected[1][name]
                torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
            engine.zero_grad()

        # Without gradients nothing is pending, and other adapters are not involved.
        engine.adapters.add("other", LoRAConfig(rank=2), seed=1)
        engine.forward_backward(batches[0], loss)
        engine.adapters.set_aside("other")
        engine.adapters.put_back("other")
        assert same_bits(gradients_of(engine), expected[0])
        engine.adapters.select("other")
        with pytest.raises(RuntimeError, match="no gradient is pending"):
            engine.optimizer_step()
        for call in (engine.adapters.set_aside, engine.adapters.put_back):
            with pytest.raises(ValueError, match="there is no adapter 'third'"):
                call("third")


@pytest.mark.world(1)
def test_manifest_has_the_entries_of_the_caller(tmp_path: Path) -> None:
    with started("fsdp:d1", lora=LORA) as engine:
        engine.adapters.save("default", tmp_path / "a", about={"run": {"step": 3}, "optimizer": "mine"})
        about = read_manifest(tmp_path / "a").about
        assert about["run"] == {"step": 3}
        assert about["optimizer"] is False
        engine.adapters.load("copy", tmp_path / "a")
