"""Tiny configurations of families that take images, and samples with images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, Gemma3Config, PreTrainedConfig

IMAGE_TOKEN = 100
SIDE = 28
"""Pixels along a side of an image of Gemma 3."""
PATCH = 2 * 3 * 4 * 4
"""Numbers of a patch: two equal frames of 4 x 4 pixels in three colours."""

_TEXT: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}
_VISION: dict[str, Any] = {
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
}


def _qwen2_5_vl(**changes: Any) -> PreTrainedConfig:
    # Windows of 4 x 4 patches in the first layer, whole images in the second.
    vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    return _config("qwen2_5_vl", _TEXT, vision, changes)


def _qwen2_vl(**changes: Any) -> PreTrainedConfig:
    # Its tower calls the width of its own states embed_dim.
    vision = {
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 2,
    }
    return _config("qwen2_vl", _TEXT, {**vision, "embed_dim": 32, "hidden_size": 32}, changes)


_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_QWEN3_VL = {**_TEXT, "head_dim": 8, "rope_parameters": {**_TEXT["rope_parameters"], "mrope_section": [2, 1, 1]}}
_QWEN3_5 = {
    **_TEXT,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**_TEXT["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
_LEARNED = {**_VISION, "num_position_embeddings": 16}


def _qwen3_vl(**changes: Any) -> PreTrainedConfig:
    # Both layers of the tower also reach a layer of the decoder.
    return _config("qwen3_vl", _QWEN3_VL, {**_LEARNED, "deepstack_visual_indexes": [0, 1]}, changes)


def _qwen3_5(family: str, **changes: Any) -> PreTrainedConfig:
    # Gated delta rule beside attention; a tower without features of inner layers.
    experts = {**_EXPERTS, "shared_expert_intermediate_size": 16} if family.endswith("moe") else {}
    return _config(family, {**_QWEN3_5, **experts}, _LEARNED, changes)


def _config(
    family: str, text: Mapping[str, Any], vision: Mapping[str, Any], changes: Mapping[str, Any]
) -> PreTrainedConfig:
    fields = {**_TOKENS, "tie_word_embeddings": False, **changes}
    return CONFIG_MAPPING[family](text_config=dict(text), vision_config=dict(vision), **fields)


def _gemma3(**changes: Any) -> PreTrainedConfig:
    # A window smaller than an image, and all keys.
    text = {
        **{name: value for name, value in _TEXT.items() if name != "rope_parameters"},
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 7,
        "vision_use_head": False,
    }
    fields = {
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 102,
        "eoi_token_index": 103,
        "mm_tokens_per_image": 4,
    }
    return Gemma3Config(text_config=text, vision_config=vision, **{**fields, "tie_word_embeddings": True, **changes})


GRID_FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    **{family: functools.partial(_qwen3_5, family) for family in ("qwen3_5", "qwen3_5_moe")},
    "qwen3_vl": _qwen3_vl,
}
"""Configurations by family whose images have any size. ``changes`` override fields of the whole model."""

VISION_FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {**GRID_FAMILIES, "gemma3": _gemma3}
"""Configurations by family. ``changes`` override fields of the whole model."""

VISION_NAMES = r"(.*\.)?(visual|vision_tower|multi_modal_projector)\..*"
"""Names of layers and weights that encode images, as a regular expression."""

GRIDS = ((1, 4, 8), (1, 4, 4), (1, 8, 6), (1, 2, 2))
SQUARE = (1, 4, 4)
"""The only grid of Gemma 3: 16 patches, which are 4 tokens."""


def images(*grids: tuple[int, int, int], seed: int) -> dict[str, Tensor]:
    """Return random images."""
    n = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(n, PATCH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def square_images(number: int, *, seed: int) -> dict[str, Tensor]:
    """Return random images of Gemma 3."""
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(number, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)}


def tokens(*parts: int | tuple[int, int, int], seed: int) -> Tensor:
    """Return random tokens: runs of text of some length, and those that stand for images of some grids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat(
        [
            torch.randint(3, 100, (part,), generator=generator)
            if isinstance(part, int)
            else torch.full((part[1] * part[2] // 4,), IMAGE_TOKEN)
            for part in parts
        ]
    )
