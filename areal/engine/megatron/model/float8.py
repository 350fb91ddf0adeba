"""Float8 products by the recipes of Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size
from transformers import PretrainedConfig

from areal.api.config import TrainEngineConfig
from areal.api.parallel import ParallelDims
from areal.engine.megatron.model.layer_spec import has_transformer_engine

_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Compute capability of GPUs that multiply numbers of a recipe."""
_FORMATS = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""Formats of Megatron-Core: ``hybrid`` has gradients in e5m2. Recipes with many scales need no larger exponents."""


def check_float8(hf: PretrainedConfig, dims: ParallelDims, config: TrainEngineConfig) -> None:
    """Check that Transformer Engine is there, and that the GPU and the sizes of a model fit a recipe.

    Raises:
        ValueError: names what is missing.
    """
    recipe = config.megatron.fp8_recipe
    if recipe is None:
        return
    option = f"megatron.fp8_recipe = {recipe!r}"
    if not has_transformer_engine():
        raise ValueError(
            f"{option} needs a GPU and Transformer Engine: pip install 'transformer-engine[pytorch]', or leave it out"
        )
    found = torch.cuda.get_device_capability()
    if found < _CAPABILITY[recipe]:
        raise ValueError(
            f"{option} needs compute capability {'.'.join(map(str, _CAPABILITY[recipe]))}, and this GPU has {found[0]}.{found[1]}; choose "
            "another recipe"
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    heads = getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
    sizes = {
        "hidden_size": hf.hidden_size,
        "num_attention_heads x head_dim": hf.num_attention_heads * head_dim // dims.tp,
        "num_key_value_heads x head_dim": heads * head_dim // dims.tp,
        "intermediate_size": hf.intermediate_size // dims.tp,
        "moe_intermediate_size": (getattr(hf, "moe_intermediate_size", None) or 0) // dims.expert_tp,
    }
    multiple = rows_at_once(config)
    for name, size in sizes.items():
        if size % multiple:
            raise ValueError(
                f"{option} with backend = '{dims}': a rank has {size} of {name}, which {multiple} does not divide; choose a smaller t, or "
                "leave it out"
            )


def float8_fields(config: TrainEngineConfig, *, experts: bool) -> dict[str, Any]:
    """Return the fields of Megatron-Core's configuration."""
    recipe = config.megatron.fp8_recipe
    if recipe is None:
        return {}
    # The rows of an expert are filled up to a multiple.
    return {"fp8": _FORMATS[recipe], "fp8_recipe": recipe, "moe_router_padding_for_quantization": experts}


def rows_at_once(config: TrainEngineConfig) -> int:
    """Return the number that must divide the tokens of a rank, and the sizes of its weights."""
    recipe = config.megatron.fp8_recipe
    return 1 if recipe is None else int(get_fp8_align_size(Fp8Recipe[recipe]))
