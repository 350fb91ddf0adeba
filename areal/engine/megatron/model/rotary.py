"""Rotary angles for explicit positions, with the frequencies of transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = ("default", "linear", "llama3", "yarn")


class RotaryAngles(nn.Module):
    """Computes angles ``[T, 1, 1, D]`` for positions ``[T]``; Megatron-Core applies cosine and sine.

    Attributes:
        scaling: scale of cosine and sine (for ``yarn``).
    """

    def __init__(self, config: PretrainedConfig, dim: int) -> None:
        super().__init__()
        rope = dict(config.rope_parameters)
        kind = rope.get("rope_type", "default")
        if kind not in _FIXED:
            raise ValueError(f"rope_type = {kind!r} in config.json: the Megatron engine has {', '.join(_FIXED)}")
        # transformers does not list the default type among its functions.
        # All families of the engine rotate whole heads then.
        if kind == "default":
            frequencies, self.scaling = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0
        else:
            frequencies, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    def forward(self, positions: Tensor) -> Tensor:
        half = positions.float()[:, None] * self.frequencies.to(positions.device).float()
        return torch.cat([half, half], dim=-1)[:, None, None, :]
