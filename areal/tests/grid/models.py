"""Tiny models with random weights, written once per session as Hugging Face directories.

Weights are drawn so that errors are visible: norm weights differ from 1 and biases from 0, logits have a scale of about 1, and
router logits differ enough that rounding does not change the selected experts.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal.api import LoRAConfig
from areal.engine.model.media import model_factory
from areal.tests.grid.recurrent_models import RECURRENT_FAMILIES
from areal.tests.grid.vision_models import VISION_FAMILIES, VISION_NAMES
from areal.tests.harness.world import digest, locked, world

VOCAB = 112
"""Vocabulary size of every tiny model."""

_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_QWEN2 = {key: value for key, value in _DENSE.items() if key != "head_dim"}
_SMOLLM = {
    **_DENSE,
    "hidden_size": 36,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    **_DENSE,
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True,
}
_MOE = {
    **_DENSE,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_DEEPSEEK = {
    **{key: value for key, value in _DENSE.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
}

FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2": lambda **changes: Qwen2Config(**{**_QWEN2, **changes}),
    "qwen3": lambda **changes: Qwen3Config(**{**_DENSE, **changes}),
    "qwen3_tied": lambda **changes: Qwen3Config(**{**_DENSE, "tie_word_embeddings": True, **changes}),
    "llama": lambda **changes: LlamaConfig(**{**_DENSE, **changes}),
    "gemma3_text": lambda **changes: Gemma3TextConfig(**{**_GEMMA3, **changes}),
    "qwen3_moe": lambda **changes: Qwen3MoeConfig(**{**_MOE, **changes}),
    "deepseek_v3": lambda **changes: DeepseekV3Config(**{**_DEEPSEEK, **changes}),
    "smollm": lambda **changes: LlamaConfig(**{**_SMOLLM, **changes}),
}
"""Configurations by family.

An entry here adds a family to the grid; ``changes`` override fields of its configuration.
"""

_HRM = {**_DENSE, "num_key_value_heads": 4, "num_layers_per_stack": 2, "H_cycles": 1, "L_cycles": 2, "L_bp_cycles": [1]}
_INKLING2 = {
    **_DENSE,
    "unpadded_vocab_size": VOCAB,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 5,
    "d_rel": 4,
    "rel_extent": 64,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
_LONGCAT = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 24},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 12},
    **{"n_routed_experts": 4, "zero_expert_num": 4, "moe_topk": 2, "initializer_range": 0.2},
}
_OLMO_HYBRID = {
    **{key: value for key, value in _DENSE.items() if key != "head_dim"},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 12,
}

OUTSIDE_THE_GRID: dict[str, Callable[..., PreTrainedConfig]] = {
    "hrm_text": lambda **changes: CONFIG_MAPPING["hrm_text"](**{**_HRM, **changes}),
    "inkling2_text": lambda **changes: CONFIG_MAPPING["inkling2_text"](**{**_INKLING2, **changes}),
    "longcat_flash": lambda **changes: CONFIG_MAPPING["longcat_flash"](**{**_LONGCAT, **changes}),
    "mistral": lambda **changes: MistralConfig(**{**_DENSE, "sliding_window": 5, **changes}),
    "olmo_hybrid": lambda **changes: CONFIG_MAPPING["olmo_hybrid"](**{**_OLMO_HYBRID, **changes}),
}
"""Configurations of families that tests name one by one."""

_RECURRENT = {family: functools.partial(make, vocab_size=VOCAB) for family, make in RECURRENT_FAMILIES.items()}

VALUE_HEAD, VALUE_HEAD_FILE = "value_head.weight", "value_head.safetensors"
"""Name and file of a value head. For transformers the model is an ordinary causal language model."""

SHARD_SIZE = {"llama": "12KB"}
"""Families written as several safetensors files with an index, as large models are."""


def model_dir(family: str, *, seed: int = 0, value_head: bool = False, **changes: Any) -> str:
    """The directory of a tiny model: ``config.json`` and float32 safetensors. Written by the first process that asks.

    Args:
        family: a key of :data:`FAMILIES`, :data:`OUTSIDE_THE_GRID`,
            :data:`~areal.tests.grid.recurrent_models.RECURRENT_FAMILIES` or
            :data:`~areal.tests.grid.vision_models.VISION_FAMILIES`.
        seed: of the weights.
        value_head: with ``value_head.safetensors`` beside the model.
        changes: fields of the configuration that differ from the family's.
    """
    path = world().cache / f"{family}-{digest((seed, value_head, sorted(changes.items())))}"
    with locked(path):
        if not path.exists():
            partial = Path(f"{path}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                config = (_RECURRENT | VISION_FAMILIES | FAMILIES | OUTSIDE_THE_GRID)[family](**changes)
            except KeyError as error:
                pytest.skip(f"this release of transformers has no model type {error}")
            model = tiny_model(config, seed)
            # In a process group, save_pretrained writes on rank 0 only and the other ranks get an empty directory.
            with mock.patch.object(torch.distributed, "is_initialized", return_value=False):
                model.save_pretrained(partial, max_shard_size=SHARD_SIZE.get(family, "5GB"))
            if value_head:
                weight = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(seed)) / 4
                save_file({VALUE_HEAD: weight}, partial / VALUE_HEAD_FILE)
            partial.rename(path)
    return str(path)


def value_head(path: str) -> torch.Tensor:
    """Return the value head ``[1, H]`` of a model directory."""
    return load_file(Path(path) / VALUE_HEAD_FILE)[VALUE_HEAD]


def adapter_dir(path: str, lora: LoRAConfig, *, seed: int = 0, head: bool = False) -> str:
    """Return the directory of an adapter for a model, drawn and saved by peft, with both factors nonzero.

    With ``head``, the output head has an adapter in addition to every linear layer.
    """
    folder = world().cache / f"{Path(path).name}-adapter-{digest((seed, head, lora.model_dump()))}"
    with locked(folder):
        if not folder.exists():
            partial = Path(f"{folder}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            config = AutoConfig.from_pretrained(path)
            model = model_factory(config).from_pretrained(path)
            experts = hasattr(model.config, "num_experts_per_tok")
            every = r".*self_attn\..*_proj(_with_mqa)?" if experts else r".*_proj"
            every += "|lm_head" if head else ""
            all_of_them = lora.target_modules == "all-linear"
            targets: str | list[str] = every if all_of_them else list(lora.target_modules)
            lora_config = LoraConfig(
                task_type="CAUSAL_LM",
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=targets,
                use_rslora=lora.rslora,
                init_lora_weights=False,
                exclude_modules=VISION_NAMES if config.model_type in VISION_FAMILIES else None,
            )
            with torch.random.fork_rng(), mock.patch.object(torch.distributed, "is_initialized", return_value=False):
                torch.manual_seed(seed)
                get_peft_model(model, lora_config).save_pretrained(partial)
            partial.rename(folder)
    return str(folder)


def tiny_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a float32 model of this configuration with weights that depend only on ``seed``."""
    model = model_factory(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_mean(name, config) + _scale(name, parameter) * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def _mean(name: str, config: PreTrainedConfig) -> float:
    """Mean of the stored norm weights: 1, or 0 for Gemma, which adds 1 to them. Recurrent states decay slowly, so that a leak shows."""
    if name.endswith("A_log"):
        return -3.0
    return 1.0 if "norm" in name and not config.model_type.startswith("gemma") else 0.0


def _scale(name: str, parameter: torch.Tensor) -> float:
    if parameter.dim() == 1:
        return 0.2
    if ".gate.weight" in name:
        return 0.6
    if "embed" in name or "lm_head" in name:
        return 0.25
    return 1.2 / parameter.shape[-1] ** 0.5
