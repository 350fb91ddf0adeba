"""Ranks whose outputs, adapters, experts or shards differ."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from areal.api import Batch, LoRAConfig, TokenOutputs, TrainEngine
from areal.engine.fsdp import gradients
from areal.tests.dist.faults.twins import raised
from areal.tests.harness.tiny import (
    Sample,
    family_dir,
    global_batch,
    gradients_of,
    layout,
    local_batch,
    loss,
    started,
)
from areal.tests.harness.world import world

LAYERS = {
    "all": LoRAConfig(),
    "attention": LoRAConfig(layer_kinds=("attention",)),
    "mlp": LoRAConfig(layer_kinds=("mlp",)),
    "head": LoRAConfig(target_modules=("lm_head",)),
}


def batches_of(engine: TrainEngine) -> tuple[list[Sample], list[Sample]]:
    """Return this rank's samples of either adapter, of one length. Data-parallel ranks have one adapter each."""
    sample = max(global_batch(), key=lambda sample: len(sample["input_ids"]))
    first, second = [{**sample, "adapter": torch.tensor(0)}], [{**sample, "adapter": torch.tensor(1)}]
    if engine.dp_size == 1:
        return first, second
    return ([], second) if engine.dp_rank else (first, [])


def gradients_of_both(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the gradients of both adapters, and forget them."""
    found = {}
    for name in ("default", "other"):
        engine.adapters.select(name)
        found |= {f"{name} {key}": value for key, value in gradients_of(engine).items()}
        engine.zero_grad()
    return found


@pytest.mark.parametrize(
    ("backend", "first", "second", "checkpointing"),
    [
        layout("fsdp:d2", "all", "head", "none"),
        layout("fsdp:d2", "all", "head", "full"),
        layout("fsdp:c2", "attention", "mlp", "none"),
        layout("megatron:d2", "all", "head", "none"),
        layout("megatron:c2", "attention", "mlp", "none"),
    ],
)
def test_adapters_of_other_layers_train_in_one_call(backend: str, first: str, second: str, checkpointing: str) -> None:
    options: dict[str, Any] = {"activation_checkpointing": checkpointing}
    if backend == "fsdp:c2":
        options["fsdp"] = {"context_parallel": "ulysses"}
    with started(backend, path=family_dir("qwen3", num_hidden_layers=3), lora=LAYERS[first], **options) as engine:
        engine.adapters.add("other", LAYERS[second])
        ones, others = batches_of(engine)
        for batch in (ones, others):
            engine.forward_backward(batch, loss, normalization="sum")
        expected = gradients_of_both(engine)
        engine.forward_backward([*ones, *others], loss, normalization="sum")
        found = gradients_of_both(engine)
    assert found.keys() == expected.keys()
    assert all(value.any() for key, value in expected.items() if ".lora_B." in key)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("backend", [layout(backend) for backend in ("fsdp:d2", "fsdp:c2", "megatron:p2", "jax:d2")])
def test_ranks_that_ask_for_different_outputs_are_told(backend: str) -> None:
    last = world().rank == world().size - 1
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        words = ("rank 0 asked for", "call the same verb with the same outputs and returns on all ranks")
        for options in ({"outputs": ("logprobs", "entropy")}, {"returns": ("logprobs",)}):
            with raised(ValueError, *words):
                engine.forward_backward(batch, loss, **(options if last else {}))
        with raised(ValueError, *words):
            engine.forward_batch(batch, outputs=("entropy",) if last else ("logprobs",))
        with raised(ValueError, *words):
            (engine.eval_batch if last else engine.forward_backward)(batch, loss)
        assert engine.train_batch(batch, loss).update_successful


@pytest.mark.world(2)
def test_reductions_are_chosen_alike_on_ranks_with_other_shards() -> None:
    sizes = (10, 10**6) if world().rank else (10, 20)
    with mock.patch.object(gradients, "trained_elements", return_value=sizes), started("fsdp:d2") as engine:
        sync = gradients.GradientSync.choose(engine._components.model, engine.config, 10**6, engine.control)
        assert engine.control.gather(sync.every) == [True, True]


@pytest.mark.parametrize("backend", [layout("fsdp:t2"), layout("megatron:t2")])
def test_loss_that_fails_on_one_part_of_the_vocabulary(backend: str) -> None:
    def reading(out: TokenOutputs, batch: Batch) -> Tensor:
        if world().rank:
            raise KeyError("no such column")
        return loss(out, batch)

    with started(backend) as engine:
        batch, outputs = global_batch(), ("logprobs", "logits")
        with raised(RuntimeError, "no such column"):
            engine.train_batch(batch, reading, outputs=outputs)
        assert engine.train_batch(batch, loss, outputs=outputs).update_successful


@pytest.mark.world(2)
def test_rank_whose_tokens_take_no_expert_with_weights() -> None:
    with started("fsdp:d2", path=family_dir("longcat_flash")) as engine:
        if world().rank:
            # The ids of experts without weights follow those of the others.
            routers = [x for x in engine._components.model.modules() if hasattr(x, "e_score_correction_bias")]
            for router in routers:
                router.e_score_correction_bias[4:] = 100
        batch, found = local_batch(engine, global_batch()), []
        for own in ([] if world().rank else batch, batch):
            engine.forward_backward(own, loss, normalization="sum")
            found.append({name: x for name, x in gradients_of(engine).items() if ".experts." in name})
            engine.zero_grad()
    alone, together = found
    assert any(x.any() for x in alone.values())
    for name, x in alone.items():
        assert torch.allclose(together[name], x, rtol=1e-5, atol=1e-7), name
