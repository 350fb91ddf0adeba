"""Replaces the forward of norms, gated MLPs and attention of transformers' models by this package's functions."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from areal.engine.model.layers.gated import silu_product
from areal.engine.model.layers.norm import rms_norm
from areal.engine.model.layers.rotary import apply_rotary_pos_emb

_ROTATION = apply_rotary_pos_emb.__name__
"""Name of the function in modules of transformers."""


@dataclass(frozen=True)
class FusedLayers:
    """Classes of a model type whose forward is one of the known formulas. ``None`` for another formula.

    Attributes:
        norm: name of the norm's class.
        mlp: name of the class with ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``.
        attention: name of the class that calls ``apply_rotary_pos_emb`` for halves of heads.
        wide_weight, offset: see :func:`~areal.engine.model.layers.norm.rms_norm`.
    """

    norm: str
    mlp: str | None = None
    attention: str | None = None
    wide_weight: bool = False
    offset: float = 0.0


FUSED: Mapping[str, FusedLayers] = {
    "deepseek_v3": FusedLayers("DeepseekV3RMSNorm", "DeepseekV3MLP"),
    "gemma3_text": FusedLayers("Gemma3RMSNorm", None, "Gemma3Attention", wide_weight=True, offset=1.0),
    "gpt_oss": FusedLayers("GptOssRMSNorm", wide_weight=True),
    "llama": FusedLayers("LlamaRMSNorm", "LlamaMLP", "LlamaAttention"),
    "qwen2": FusedLayers("Qwen2RMSNorm", "Qwen2MLP", "Qwen2Attention"),
    "qwen3": FusedLayers("Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"),
    "qwen3_moe": FusedLayers("Qwen3MoeRMSNorm", "Qwen3MoeMLP", "Qwen3MoeAttention"),
}
"""Fused layers by model type. Each is compared with transformers' own modules by the tests."""


def fuse_layers(model: nn.Module, model_type: str) -> int:
    """Replace the forward of layers of a model, in place. Parameters, buffers and classes stay.

    Args:
        model: model of transformers, or some of its layers.
        model_type: model type of its configuration. Types that :data:`FUSED` lacks are left as they are.

    Returns:
        Number of replaced forwards.
    """
    fused = FUSED.get(model_type)
    if fused is None:
        return 0
    replaced = 0
    for module in model.modules():
        name = type(module).__name__
        forward: Any = None
        if name == fused.norm:
            forward = _norm_forward(fused)
        elif name == fused.mlp and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            forward = _gated_forward
        elif name == fused.attention and _ROTATION in type(module).forward.__code__.co_names:
            forward = _with_rotation(type(module).forward)
        if forward is not None:
            # A bound method: a copy of the model gets a method of the copied module.
            module.forward = types.MethodType(forward, module)
            replaced += 1
    return replaced


def _norm_forward(fused: FusedLayers) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return rms_norm(hidden_states, self.weight, eps, wide_weight=fused.wide_weight, offset=fused.offset)

    return forward


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))
    return out


def _with_rotation(function: Any) -> Any:
    """Return a copy of an attention's forward that finds this package's rotation under the name it calls."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, _ROTATION: apply_rotary_pos_emb},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
