"""Experts whose weights or forward differ from those of most families are refused where they would not be converted or sent to ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig, NemotronHConfig, Qwen3MoeConfig

from areal.api import Float8Config, ParallelDims, QuantizationConfig
from areal.engine.fsdp.expert_parallel import check_experts
from areal.engine.model.heads import decoder_layers
from areal.engine.torch.float8.layers import convert_layers
from areal.engine.torch.float8.products import Products
from areal.engine.torch.quantization.layers import round_layers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "gpt_oss": (GptOssConfig, {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4_text": (
        Llama4TextConfig,
        {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
    ),
    "nemotron_h": (
        NemotronHConfig,
        {
            "layers_block_type": ["full_attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
}
WHY = {
    "gpt_oss": "experts whose inputs are rows",
    "llama4_text": "experts whose inputs are rows",
    "nemotron_h": "the experts' weights up_proj, down_proj",
}


def model_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(kind(**{**SIZES, **sizes}))


def unused(x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
    raise AssertionError("no product is computed here")


def converted(layers: list[nn.Module], kind: str, exclude: tuple[str, ...] = ()) -> list[str]:
    if kind == "quantization":
        return round_layers(layers, QuantizationConfig(format="nvfp4", exclude=exclude))
    config = Float8Config(recipe="mxfp8", experts=True, emulate=True, exclude=exclude)
    return convert_layers(layers, config, Products(unused, unused, 16))


@pytest.mark.parametrize("kind", ["quantization", "float8"])
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_converted_or_refused(name: str, kind: str) -> None:
    if name not in WHY:
        assert any(found.endswith("experts") for found in converted(decoder_layers(model_of(name)), kind))
        return
    with pytest.raises(ValueError, match=rf"experts has {WHY[name]}.*add 'experts' to {kind}.exclude"):
        converted(decoder_layers(model_of(name)), kind)
    rest = converted(decoder_layers(model_of(name)), kind, ("experts", "router", "gate"))
    assert any(found.endswith("q_proj") for found in rest)
    assert not any(found.endswith("experts") for found in rest)


def test_experts_without_ids_of_experts_are_not_spread_over_ranks() -> None:
    dims = ParallelDims.parse("fsdp:e2")
    model = model_of("llama4_text")
    with pytest.raises(
        ValueError, match=r"experts of model type 'llama4_text' do not take the ids of experts.*leave e out"
    ):
        check_experts(model.config, model, dims)
    model = model_of("qwen3_moe")
    check_experts(model.config, model, dims)
