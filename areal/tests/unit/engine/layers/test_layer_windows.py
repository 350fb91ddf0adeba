"""Windows of layers: the keys that reach a token in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from areal.engine.model.hub import layer_windows

LENGTH, WINDOW = 6, 3
SIZES = {
    **{
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
    },
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_window_layers": 0},
    **{"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}


def one_layer(family: str, **changes: Any) -> PretrainedConfig:
    windows = {"sliding_window": WINDOW, "use_sliding_window": True}
    return AutoConfig.for_model(family, **SIZES | windows | changes)


def keys_of_last_token(config: PretrainedConfig) -> int:
    """Return how many positions the last output of a model of one layer depends on."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    embeddings = torch.randn(1, LENGTH, config.hidden_size, requires_grad=True)
    model(inputs_embeds=embeddings, use_cache=False).logits[0, -1].pow(2).sum().backward()
    assert embeddings.grad is not None
    return int((embeddings.grad[0].abs().sum(-1) > 0).sum())


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_windows_are_those_of_transformers(family: str, kind: str) -> None:
    config = one_layer(family, layer_types=[kind])
    [window] = layer_windows(config)
    assert (window or LENGTH) == keys_of_last_token(config)


def test_models_without_a_window_have_none() -> None:
    config = one_layer("mistral", sliding_window=None)
    assert layer_windows(config) == (None,)
    assert keys_of_last_token(config) == LENGTH


def test_unknown_kinds_of_layers_are_refused() -> None:
    config = one_layer("qwen3", layer_types=["chunked_attention"])
    with pytest.raises(
        ValueError, match=r"layer_types has 'chunked_attention' in config.json: qwen3 has full_attention"
    ):
        layer_windows(config)
