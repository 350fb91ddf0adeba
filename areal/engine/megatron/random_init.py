"""Random weights for a Megatron-Core model: those that transformers draws, block by block, under the names of the files."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from areal.engine.checkpoint.tensor_layout import disk_layout
from areal.engine.model.random_init import draw


def draw_weights(
    config: PretrainedConfig, seed: int, dtype: torch.dtype, take: Callable[[dict[str, Tensor]], None]
) -> None:
    """Draw the weights of the model that a configuration describes. The whole model is never in memory.

    Args:
        config: of the Hugging Face model. seed: of the weights. dtype: in which they are drawn.
        take: called with each block's tensors by their names on disk, full and on the CPU.
    """
    with torch.device("meta"):
        # A copy: building a model writes the chosen implementations into the configuration that it is given.
        hf = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    layout = disk_layout(hf)

    def named(block: dict[str, Tensor]) -> None:
        take({piece.name: piece.cut(full) for name, full in block.items() for piece in layout[name]})

    draw(hf, seed, named)
