"""Engines with adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal.api import LoRAConfig, TrainEngine
from areal.tests.grid.layouts import LORA
from areal.tests.harness.tiny import (
    global_batch,
    local_batch,
    loss,
    started,
)
from areal.utils.dtensor import local_part


def adapted(backend: str, **changes: Any) -> Any:
    return started(backend, lora=LORA, **changes)


def train(engine: TrainEngine, *seeds: int) -> None:
    for seed in seeds:
        engine.train_batch(local_batch(engine, global_batch(seed)), loss)


def of(engine: TrainEngine) -> dict[str, Tensor]:
    """Return a copy of the selected adapter."""
    return {name: tensor.clone() for name, tensor in engine.adapters.named_tensors()}


def model_of(engine: Any) -> list[Tensor]:
    """Return this rank's shard of every weight of the model, which may be a JAX array."""
    model = engine._components.model
    if isinstance(model, nn.Module):
        return [local_part(parameter.detach()) for parameter in model.parameters()]
    return [torch.from_numpy(np.array(shard.data)) for x in model.params.values() for shard in x.addressable_shards]


def logprobs(engine: TrainEngine, seed: int = 0) -> list[Tensor]:
    return engine.forward_batch(local_batch(engine, global_batch(seed)))


def moments(engine: TrainEngine, name: str) -> dict[str, Tensor]:
    """Return this rank's shard of an adapter's optimizer state."""
    return {spec.name: entry.values.clone() for spec, entry in engine.adapters[name].local_slices(with_optim=True)}


def mine_of(backend: str) -> list[dict[str, Tensor]]:
    with adapted(backend) as engine:
        return local_batch(engine, global_batch())


def scores(model: Any, sample: dict[str, Tensor]) -> Tensor:
    ids = sample["input_ids"]
    with torch.no_grad():
        picked = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([picked, torch.zeros(1)])


Sample = dict[str, Tensor]


ADAPTERS = {
    "default": (LORA, True),
    "narrow": (LoRAConfig(rank=3, target_modules=("q_proj", "v_proj")), False),
    "late": (LoRAConfig(rank=5, alpha=7, target_modules=("o_proj", "lm_head")), False),
}
"""Adapters of different ranks, scales and layers, and whether each also has the head."""


ORDER = (1, 0, 2, 2, 0, 1, 0, 2, 1, 1)
"""Adapter of each sample: none is next to all others of its adapter."""


def named(samples: list[Sample], order: tuple[int, ...] = ORDER) -> list[Sample]:
    """Return samples that name their adapter."""
    return [{**sample, "adapter": torch.tensor(k)} for sample, k in zip(samples, order, strict=False)]


def without_key(samples: list[Sample], adapter: int) -> list[Sample]:
    """Return the samples of one adapter, without the key."""
    return [
        {key: x for key, x in sample.items() if key != "adapter"} for sample in samples if sample["adapter"] == adapter
    ]
