"""Adapters of the JAX engine: their steps on several ranks, how many programs are compiled, and what these compute."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal.api import LoRAConfig, MicroBatchSpec
from areal.tests.harness.tiny import global_batch, local_batch, loss, started

pytest.importorskip("jax")

from areal.engine.jax import bridge

QUERIES = LoRAConfig(rank=3, target_modules=("q_proj",))


def samples(adapters: list[int]) -> list[dict[str, torch.Tensor]]:
    """Return one sample of eight tokens for each adapter."""
    return [
        {
            "input_ids": torch.arange(8) + 8 * k,
            "advantages": torch.ones(8),
            "loss_mask": torch.ones(8),
            "adapter": torch.tensor(k),
        }
        for k in adapters
    ]


@pytest.mark.world(1)
def test_programs_do_not_depend_on_which_adapters_a_call_names() -> None:
    rng, before = random.Random(0), bridge._evaluate._cache_size()
    with started("jax:d1", lora=QUERIES, mb_spec=MicroBatchSpec()) as engine:
        for number in range(7):
            engine.adapters.add(f"model-{number}", seed=number)
        for _ in range(30):
            chosen = rng.sample(range(8), rng.choice([1, 2, 3, 4]))
            rows = engine.forward_batch(samples(sorted(chosen)))
            assert len(rows) == len(chosen)
        # One program for each power of two.
        assert bridge._evaluate._cache_size() - before == 3
        # With all of them off, the program is the same.
        with engine.reference():
            engine.forward_batch(samples([1, 2, 4]))
        assert bridge._evaluate._cache_size() - before == 3


@pytest.mark.world(2)
def test_step_of_all_samples_is_the_same_on_every_rank() -> None:
    with started("jax:d2", lora=QUERIES) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        own = torch.cat([factor.parameter.detach().flatten() for factor in engine.adapters["default"].factors])
    of_first = own.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(own, of_first)


@pytest.mark.world(1)
def test_no_program_computes_a_gradient_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of activations have a first dimension for data-parallel ranks. Gradients of a layer's weight do not."""
    programs = []

    def watch(name: str) -> None:
        pull = getattr(bridge, name)

        def watched(*args: Any) -> Any:
            programs.append(pull.lower(*args).as_text())
            return pull(*args)

        monkeypatch.setattr(bridge, name, watched)

    for name, lora in (("_pull", None), ("_pull_factors", QUERIES)):
        watch(name)
        with started("jax:d1", lora=lora, mb_spec=MicroBatchSpec()) as engine:
            model: Any = engine._components.model
            shapes = [x.shape[-2:] for x in model.params.values() if x.ndim > 1]
            weights = {*shapes, *(shape[::-1] for shape in shapes)}  # gradients may be transposed
            batch = [{key: x for key, x in sample.items() if key != "adapter"} for sample in samples([0])]
            engine.forward_backward(batch, loss, normalization="sum")
    full, frozen = (_products(program) & weights for program in programs)
    assert len(full) >= 3
    assert not frozen


def _products(program: str) -> set[tuple[int, ...]]:
    """Return the shapes of the results of matrix products."""
    shapes = re.findall(r"stablehlo\.dot_general.*-> tensor<([\dx]+)xf32>", program)
    return {tuple(map(int, shape.split("x"))) for shape in shapes}
