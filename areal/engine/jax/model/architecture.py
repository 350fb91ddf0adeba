"""What a decoder of the JAX engine consists of: sizes, options of its layers, and its parameters by name.

The parameters of one kind of all layers are one array: ``model.layers.3.mlp.up_proj.weight`` is row 3 of the array
``model.layers.*.mlp.up_proj.weight``. Nothing else is renamed, transposed or merged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jax import Array
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal.engine.batch_rules import Experts
from areal.engine.model.classifier import VALUE_BIAS, VALUE_WEIGHT, value_bias
from areal.engine.model.hub import check_rope, layer_windows

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` that the engine computes."""

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER = "model.layers.*."
"""Prefix of the arrays with one row for each layer."""

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Weights of the experts within a layer, stacked as in memory of transformers."""

_IN_A_LAYER = frozenset(
    {
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
        *(f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        *("mlp.gate.weight", *EXPERTS),
        *(f"mlp.{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
    }
)
UNLIMITED = 2**30
"""Window of a layer without one: more tokens than a sequence has."""


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a mixture of experts.

    Attributes:
        n_experts: experts of a layer.
        per_token: experts that compute a token.
        normalized: the weights of a token's experts sum to 1.
    """

    n_experts: int
    per_token: int
    normalized: bool


@dataclass(frozen=True)
class Architecture:
    """Sizes and options of a decoder. Hashable: programs are compiled once for each.

    Attributes:
        n_layers, n_heads, n_kv_heads, head_dim: sizes of the attention layers.
        eps: constant of the root-mean-square norms.
        windows: for each layer, the number of tokens that a token attends to, itself included.
        inv_freq: rotary frequencies, ``head_dim / 2`` of them.
        rope_scale: factor on the sines and cosines.
        pad_token_id: token whose embedding gets no gradient where it is looked up; ``None`` without one.
        tied: the output head is the embedding.
        experts: of every layer; ``None`` for dense layers.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int, ...]
    inv_freq: tuple[float, ...]
    rope_scale: float
    pad_token_id: int | None
    tied: bool
    experts: ExpertSizes | None = None

    @classmethod
    def of(cls, hf: PreTrainedModel) -> Architecture:
        """Return the architecture of a model of :data:`FAMILIES`, which may be on the meta device."""
        config, decoder = hf.config, hf.model
        # The frequencies as the family's own module computes them, whatever scaling its configuration names.
        with torch.device("cpu"):
            rotary = type(decoder.rotary_emb)(config)
        return cls(
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            eps=config.rms_norm_eps,
            windows=tuple(window or UNLIMITED for window in layer_windows(config)),
            inv_freq=tuple(rotary.inv_freq.double().tolist()),
            rope_scale=float(rotary.attention_scaling),
            pad_token_id=decoder.embed_tokens.padding_idx,
            tied=hf.get_output_embeddings().weight is hf.get_input_embeddings().weight,
            experts=_experts(config),
        )

    @property
    def head(self) -> str:
        """Name of the output head's weight."""
        return EMBEDDING if self.tied else HEAD

    @property
    def routers(self) -> Experts:
        """What the routers choose from."""
        experts = self.experts
        return Experts() if experts is None else Experts(self.n_layers, experts.n_experts, experts.per_token)


@dataclass(frozen=True)
class ParameterInfo:
    """One array of parameters.

    Attributes:
        shape: of the whole array.
        names: Hugging Face name of each row for an array over layers, else the one name.
        stacked: whether the array has one row for each layer.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    stacked: bool


def meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of transformers on the meta device: the authority for names, shapes and files.

    Raises:
        ValueError: the engine does not compute this family, or an option of its configuration.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type = {config.model_type!r} with backend = 'jax:...': the JAX engine computes {', '.join(FAMILIES)}; "
            "choose 'fsdp' for other families"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout = {config.attention_dropout} with backend = 'jax:...': the JAX engine has no dropout; "
            "set it to 0 in config.json"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act = {config.hidden_act!r} with backend = 'jax:...': the JAX engine has 'silu'")
    if config.model_type == "qwen3_moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        raise ValueError(
            f"mlp_only_layers = {config.mlp_only_layers}, decoder_sparse_step = {config.decoder_sparse_step}: the JAX engine runs "
            "layers of one kind; choose 'fsdp' for dense layers among layers with experts"
        )
    check_rope(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameters_of(hf: PreTrainedModel, *, value_head: bool) -> dict[str, ParameterInfo]:
    """Return the arrays of a model by name, in the order of the model.

    Raises:
        ValueError: the model has a parameter that the engine does not compute with.
    """
    rows: dict[str, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in hf.named_parameters():
        stacked = stacked_name(name)
        rows.setdefault(stacked, []).append(name)
        shapes[stacked] = tuple(parameter.shape)
    known = {EMBEDDING, NORM, HEAD, *(f"{LAYER}{name}" for name in _IN_A_LAYER)}
    unknown = sorted(set(rows) - known)
    if unknown:
        raise ValueError(f"{type(hf).__name__} has {unknown[0]}, which the JAX engine does not compute: choose 'fsdp'")
    found = {
        name: ParameterInfo((len(names), *shapes[name]) if LAYER in name else shapes[name], tuple(names), LAYER in name)
        for name, names in rows.items()
    }
    if value_head:
        found[VALUE_WEIGHT] = ParameterInfo((1, hf.config.hidden_size), (VALUE_WEIGHT,), False)
        if value_bias(hf.config):
            found[VALUE_BIAS] = ParameterInfo((1,), (VALUE_BIAS,), False)
    return found


def stacked_name(name: str) -> str:
    """Return the name of the array that has a parameter of transformers, or one of its rows."""
    return re.sub(r"^model\.layers\.\d+\.", LAYER, name)


def _experts(config: PretrainedConfig) -> ExpertSizes | None:
    if config.model_type != "qwen3_moe":
        return None
    return ExpertSizes(config.num_experts, config.num_experts_per_tok, config.norm_topk_prob)


def layer_arrays(params: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays over layers, by their names within a layer."""
    return {name.removeprefix(LAYER): value for name, value in params.items() if name.startswith(LAYER)}
