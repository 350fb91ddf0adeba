"""Tiny configurations of families with recurrent layers: linear attention, state spaces and short convolutions beside attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from areal.engine.model.tiny_config import shrink
from areal.tests.zoo.configs import FIELDS

_FAMILIES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
    *("lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_next", "zamba", "zamba2"),
)
IN_ROWS = ("minimax", "recurrent_gemma", "rwkv", "xlstm")
"""Families in whose recurrent layers each sequence is a row."""


def _tiny(family: str, **changes: Any) -> PreTrainedConfig:
    # Two layers of each kind, which some families tie to each other.
    config = shrink(AutoConfig.for_model(family, **FIELDS.get(family, {})), per_kind=2)
    fields = {"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    for name, value in {**fields, **changes}.items():
        setattr(config, name, value)
    # Some families compute settings from others when a configuration is made.
    return type(config).from_dict(config.to_dict())


RECURRENT_FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    family: functools.partial(_tiny, family) for family in (*_FAMILIES, *IN_ROWS)
}
"""Configurations by family. ``changes`` override fields of the tiny configuration."""
