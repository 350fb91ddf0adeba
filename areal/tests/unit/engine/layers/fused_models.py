"""Tiny models of the families with fused layers, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig

from areal.engine.model.fused_layers import FUSED
from areal.tests.grid.models import FAMILIES
from areal.tests.grid.vision_models import VISION_FAMILIES

_GPT_OSS: dict[str, Any] = {
    **{"vocab_size": 112, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 4},
    **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "pad_token_id": 2},
}
CONFIGS: dict[str, Callable[[], Any]] = {
    **{name: make for name, make in (FAMILIES | VISION_FAMILIES).items() if name in FUSED},
    "gpt_oss": lambda: GptOssConfig(**_GPT_OSS),
}
REPLACED = {
    "deepseek_v3": 2 * (4 + 1 + 1) + 1,  # two norms of a layer are of the latents; a dense MLP and shared experts
    "gemma3": 2 * (6 + 1) + 1 + 1,  # the last one of the projector
    "gemma3_text": 3 * (6 + 1) + 1,
    "gpt_oss": 2 * (2 + 1) + 1,
    "llama": 2 * (2 + 1 + 1) + 1,
    "qwen2": 2 * (2 + 1 + 1) + 1,
    "qwen2_5_vl": 2 * (2 + 1 + 1) + 1 + 2 * 2 + 1,  # norms of the tower
    "qwen2_vl": 2 * (2 + 1 + 1) + 1,
    "qwen3": 2 * (4 + 1 + 1) + 1,
    "qwen3_moe": 2 * (4 + 1) + 1,
    "qwen3_vl": 2 * (4 + 1 + 1) + 1,
}
"""Number of forwards that are replaced in each tiny model."""


def results(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return the logits of a model, and the gradients of all its parameters for a weighted sum of them."""
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits).sin()).sum().backward()
    return {"logits": logits, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
