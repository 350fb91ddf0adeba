"""Micro-batches of recipes: a sample that is longer than the budget does not end a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.recipes import DistillConfig, DPOConfig, GRPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from areal.utils.data import plan_batch

RECIPES: dict[Any, dict[str, Any]] = {
    SFTConfig: {},
    DPOConfig: {},
    RewardModelConfig: {},
    GRPOConfig: {"max_new_tokens": 64},
    PPOConfig: {"max_new_tokens": 64},
    DistillConfig: {"max_new_tokens": 64, "teacher": "t"},
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_long_sample_has_a_micro_batch_of_its_own(recipe: Any) -> None:
    spec = recipe(model="m", max_tokens_per_mb=16, **RECIPES[recipe]).micro_batches()
    lengths = [4, 4, 40, 30, 6, 2]
    samples = [torch.arange(100 * i, 100 * i + n) for i, n in enumerate(lengths)]  # without common prefixes
    plan = plan_batch([{"input_ids": x, "loss_mask": torch.ones_like(x)} for x in samples], spec, align=1)
    mbs = plan.build(n_mbs=plan.n_mbs, device=torch.device("cpu")).mbs
    made = sorted(mb.n_tokens for mb in mbs)
    pairs = recipe in (DPOConfig, RewardModelConfig)
    assert made == ([16, 70] if pairs else [16, 30, 40])
