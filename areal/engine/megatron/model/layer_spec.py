"""Layer specifications for Megatron-Core: local modules or those of Transformer Engine, both with our packed
attention.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_layer_specs,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from areal.engine.attention.context_parallel import AttentionLayout
from areal.engine.attention.kernels import AttentionOptions
from areal.engine.megatron.router import RoutedLayer, RoutedTopK
from areal.engine.model.hub import Windows
from areal.engine.moe.routing import Routing
from areal.engine.stream.layout import AdapterRuns

# Without Transformer Engine, multi_latent_attention mistakes placeholder classes for the real ones: set the flag correctly.
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms within latent attention: fixed in transformers, regardless of ``rms_norm_eps``."""


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and a GPU is available."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


@dataclass
class PackedLayout(PackedSeqParams):
    """Data that Megatron-Core passes through its layers to attention: packed sequences and their rotary angles.

    To Megatron-Core the tokens are a single sequence, so that its own code for packed sequences does not run.

    Attributes:
        layout: attention layout of this micro-batch.
        angles: rotary angles ``[T, 1, D]`` of this rank's positions, and the scale of their cosine and sine.
        routing: routing of this micro-batch, for the routers.
        adapters: runs of tokens with one adapter, for the linear layers.
    """

    layout: AttentionLayout | None = None
    angles: tuple[Tensor, float] | None = None
    routing: Routing | None = None
    adapters: AdapterRuns | None = None


class PackedAttention(nn.Module):
    """The packed attention of all engines, as ``core_attention`` of a Megatron-Core layer.

    Args:
        config, layer_number, softmax_scale: settings of the layer.
        windows: sliding window of each layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        windows: Windows,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        channels = k_channels or config.kv_channels
        scale = softmax_scale if softmax_scale is not None else channels**-0.5
        self._options = AttentionOptions(scale=scale, window=windows[layer_number - 1])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedLayout | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the attention output ``[T, 1, Hq * Dv]``.

        Args:
            query: ``[T, 1, Hq, D]``, or without the dimension of size 1.
            key: ``[T, 1, Hkv, D]``, or without the dimension of size 1.
            value: ``[T, 1, Hkv, Dv]``, or without the dimension of size 1.
            attention_mask: not used.
            packed_seq_params: layout of the micro-batch.
        """
        if packed_seq_params is None or packed_seq_params.layout is None:
            raise ValueError("packed attention needs packed_seq_params=PackedLayout(...)")
        q, k, v = (x.flatten(0, -3) for x in (query, key, value))
        out = packed_seq_params.layout.attend(q, k, v, self._options)
        return out.reshape(len(out), 1, -1)


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich, 2019) as in Hugging Face models.

    With sequence parallelism each rank has a slice of the tokens. The weight is then marked, so that its gradients
    are summed.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Normalise in float32, and multiply in the dtype of the input, in this order.
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class LatentAttention(MLASelfAttention):
    """Megatron-Core's multi-head latent attention (DeepSeek-V2, 2024) over packed tokens.

    Angles come from the layout. Down projections are replicated on all tensor-parallel ranks: split, as in
    Megatron-Core's local layers, the gradient of the rotary key, which all heads share, would only include one
    rank's heads.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ) -> None:
        local = submodules.linear_kv_down_proj is ColumnParallelLinear
        # Without an explicit group, Megatron-Core would use its global state.
        queries = ModuleSpec(module=submodules.linear_q_proj, params={"tp_group": pg_collection.tp})
        submodules = replace(submodules, linear_q_proj=queries)
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, **options)
        self.rotary_pos_emb = _AnglesFromLayout()
        self.config = copy.copy(config)
        # Set only now: with "yarn" the forward accepts a scale in addition to the angles, but the constructor would
        # compute a table in pinned memory.
        self.config.rope_type = "yarn"
        # Replace the split down projections of local layers by replicated ones.
        if local:
            self.linear_kv_down_proj = ReplicatedLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        if local and config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, config.q_lora_rank)
        # transformers uses a fixed epsilon here.
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module: Any = getattr(self, name, None)
            if hasattr(module, "eps"):
                module.eps = LATENT_NORM_EPS


class ReplicatedLinear(nn.Module):
    """A linear layer with the same weight ``[out, hidden_size]`` on all tensor-parallel ranks.

    Its input is this rank's tokens with sequence parallelism, else all tokens.
    """

    def __init__(self, config: TransformerConfig, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class _AnglesFromLayout(nn.Module):
    """Replaces the rotary embedding of latent attention: returns the angles of the layout."""

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Tensor, config: TransformerConfig, packed: PackedLayout
    ) -> PackedLayout:
        return packed

    def forward(self, packed: PackedLayout, packed_seq: bool = False) -> tuple[Tensor, float]:
        if packed.angles is None:
            raise ValueError("latent attention needs packed_seq_params=PackedLayout(angles=...)")
        return packed.angles


def block_spec(
    config: TransformerConfig, windows: Windows, *, pp_rank: int, vp_stage: int | None, local: bool = False
) -> TransformerBlockSubmodules:
    """Return the layers of one model chunk, and the norm after them.

    Uses Transformer Engine's layers on a GPU, and Megatron-Core's local layers otherwise or if ``local``. Attention
    is ours in both.
    """
    te = has_transformer_engine() and not local
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=te, normalization=config.normalization)
    # Specs cover all layers: select those of this chunk.
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    norm: Any = TENorm if te else RMSNorm
    for spec in {id(spec): spec for spec in specs}.values():  # layers share spec objects: change each once
        _use_our_modules(spec, windows, None if te else RMSNorm)
    return TransformerBlockSubmodules(layer_specs=specs[first : first + count], layer_norm=norm)


def _use_our_modules(spec: ModuleSpec, windows: Windows, norm: type[nn.Module] | None) -> None:
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    # Attention, router and norms are ours; everything else is Megatron-Core's.
    attention.core_attention = functools.partial(PackedAttention, windows=windows)
    if layer.self_attention.module is MLASelfAttention:
        layer.self_attention.module = LatentAttention
        attention.core_attention = ModuleSpec(module=PackedAttention, params={"windows": windows})
    if isinstance(getattr(layer.mlp, "submodules", None), MoESubmodules):
        spec.module, layer.mlp.submodules.router = RoutedLayer, RoutedTopK
    if norm is None:
        return
    for owner in (layer, attention):
        for name in ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(getattr(owner, name, None), "__name__", "") == "WrappedTorchNorm":
                setattr(owner, name, norm)
