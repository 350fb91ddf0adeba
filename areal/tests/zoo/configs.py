"""Tiny configurations of the families, from the default configuration of each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal.engine.model.tiny_config import tiny_configs

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Every ``model_type`` that the installed transformers builds as a causal language model."""

MAX_PARAMETERS = 20_000_000
"""Largest model that is run."""

_QWEN4 = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256},
    **{"indexer_budget": 8, "indexer_compress_ratio": 2},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}},
    "granite": {"logits_scaling": 8.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "pegasus": {"is_encoder_decoder": False, "is_decoder": True},
    "prophetnet": {"is_encoder_decoder": False, "is_decoder": True},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "num_buckets": 2},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
}
"""Fields that the default configuration of a family leaves unset, or sets so that less is tested than in a causal language model."""


def tiny_config(family: str) -> PretrainedConfig:
    """Return a tiny configuration of a family that transformers can build.

    Raises:
        Exception: transformers builds no tiny model of this family, or only one that is too large.
    """
    config = AutoConfig.for_model(family, **FIELDS.get(family, {}))
    # Models that are encoders by default.
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        if hasattr(part, "is_decoder") and not part.is_encoder_decoder:
            part.is_decoder = True
    # The first copy that can be built.
    failure: Exception = ValueError("no tiny configuration")
    for tiny in _copies(config):
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(tiny))
        except Exception as error:  # a model may raise anything
            failure = error
            continue
        size = sum(parameter.numel() for parameter in model.parameters())
        if size <= MAX_PARAMETERS:
            return tiny
        failure = ValueError(f"{size:,} parameters are too many to run")
    raise failure


def _copies(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    for tiny in tiny_configs(config):
        tiny.validate()
        yield tiny
