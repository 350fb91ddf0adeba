"""Random weights of a Megatron-Core model: drawn by transformers, block by block, under the names in files."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from areal.engine.checkpoint.tensor_layout import disk_layout, joined
from areal.engine.model.random_init import draw


def draw_weights(
    config: PretrainedConfig, seed: int, dtype: torch.dtype, take: Callable[[dict[str, Tensor]], None]
) -> None:
    """Draw the weights of a model from its configuration. The full model is never in memory.

    Args:
        config: configuration of the Hugging Face model.
        seed: seed of the weights.
        dtype: dtype in which weights are drawn.
        take: called with the tensors of each block by their names on disk, in full and on the CPU.
    """
    with torch.device("meta"):
        # A copy, because building a model changes the configuration.
        hf = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    layout = disk_layout(hf)

    # One drawn tensor may be several on disk, e.g. stacked experts.
    def named(block: dict[str, Tensor]) -> None:
        take(dict(joined((piece, piece.cut(full)) for name, full in block.items() for piece in layout[name])))

    draw(hf, seed, named)
