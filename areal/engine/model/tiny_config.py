"""Tiny copies of a configuration: small sizes, and one layer of each kind."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 96
"""Vocabulary size of a tiny copy."""

_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16
_NAMES_BY_SIZE = (
    # Vocabulary and positions.
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (VOCABULARY, "encoder_hash_byte_group_vocab shape_vocab_size pronunciation_vocab_size"),
    (256, "max_position_embeddings"),
    (0, "pad_token_id"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
    # Widths of the residual stream.
    (_HIDDEN, "hidden_size embedding_size input_embedding_size ple_embed_dim hidden_size_global lru_width"),
    (_HIDDEN, "word_embed_proj_dim embedding_dim backbone_hidden_size adapter_in_dim adapter_out_dim"),
    (80, "output_embedding_size"),
    (32, "shape_embed_dim pronunciation_embed_dim"),
    # Widths of heads.
    (_HEAD_DIM, "head_dim global_head_dim qk_nope_head_dim qk_rope_head_dim swa_head_dim rotary_dim dim_head d_head"),
    (_HEAD_DIM, "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim indexer_head_dim"),
    (_HEAD_DIM, "attention_head_size kv_channels mamba_d_head mamba_head_dim mamba_headdim"),
    (12, "v_head_dim"),
    (32, "qk_head_dim attention_head_dim"),
    # Widths inside of a layer.
    (24, "q_lora_rank kv_lora_rank o_lora_rank"),
    (48, "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim"),
    (48, "ffn_hidden_size feed_forward_size dim_ff dff d_inner"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    (32, "shared_intermediate_size moe_shared_expert_intermediate_size"),
    (16, "hidden_size_per_layer_input laurel_rank adapter_rank router_hidden_size"),
    # Numbers of heads.
    (_HEADS, "num_attention_heads decoder_attention_heads encoder_attention_heads swa_num_attention_heads"),
    (_HEADS, "num_decoder_attention_heads num_encoder_attention_heads linear_num_value_heads linear_num_heads"),
    (_HEADS, "index_n_heads"),
    (2, "linear_num_key_heads swa_num_key_value_heads"),
    # State-space layers, whose inner width is twice the hidden size.
    (2 * _HIDDEN, "mamba_d_ssm"),
    (2 * _HIDDEN // _HEAD_DIM, "num_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    (8, "mamba_d_state ssm_state_size state_size mamba_dt_rank time_step_rank"),
    (2, "mamba_expand"),
    (1, "mamba_n_groups n_groups"),
    # Experts.
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok"),
    (1, "n_group topk_group first_k_dense_replace"),
    # Windows and chunks, shorter than the sequences that a probe runs.
    (4, "sliding_window window_size attention_window attention_window_size attention_chunk_size local_attention"),
    (4, "index_topk"),
    (8, "chunk_size mamba_chunk_size"),
    # Periods of kinds of layers, and layers that share keys and values with earlier ones.
    (2, "attn_layer_period expert_layer_period"),
    (1, "attn_layer_offset expert_layer_offset num_kv_shared_layers"),
)
_SIZES: Mapping[str, int] = {name: size for size, names in _NAMES_BY_SIZE for name in names.split()}
"""Sizes of a tiny copy, by the names of all families. A configuration has some of them."""

_LAYERS = (
    *("num_hidden_layers", "decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"),
    *("num_layers", "num_blocks"),
)
"""Names of the number of layers."""


def tiny_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield tiny copies of a configuration, of which at least one should run: some families need two layers of each kind."""
    yield from (shrink(config), shrink(config, per_kind=2))
    # Some families compute settings from others when a configuration is made.
    yield type(config).from_dict(shrink(config).to_dict())


def shrink(config: PretrainedConfig, *, per_kind: int = 1) -> PretrainedConfig:
    """Return a copy of a configuration with small sizes, few layers and no dropout.

    Args:
        config: configuration of a causal language model.
        per_kind: number of layers of each kind. At least two layers are left in all.
    """
    # Settings of single layers come last. Without them, every attribute can be read.
    layer_configs = {int(i): dict(values) for i, values in (config.to_dict().get("per_layer_config") or {}).items()}
    config = copy.deepcopy(config)
    if layer_configs:
        config.per_layer_config = None
    tiny = copy.deepcopy(config)
    # The parts of a model with several configurations, each by itself.
    for name, value in list(vars(tiny).items()):
        if isinstance(value, PretrainedConfig):
            setattr(tiny, name, shrink(value, per_kind=per_kind))
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(tiny, name, 0.0)
    # Every size that the configuration has. Some families compute a size, and refuse to set it.
    for name, size in _SIZES.items():
        if _is_number(tiny, name):
            _set(tiny, name, min(size, getattr(tiny, name)) if name == "num_experts_per_tok" else size)
    # Attention may be as wide as the residual stream, or twice as wide.
    if _is_number(config, "attention_hidden_size"):
        _set(tiny, "attention_hidden_size", _HIDDEN * (config.attention_hidden_size // config.hidden_size))
    # Key heads keep their kind: as many as query heads, grouped, or a single one.
    for name in ("num_key_value_heads", "num_kv_heads", "num_query_groups"):
        if _is_number(config, name):
            heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, name)
            _set(tiny, name, _HEADS if kv_heads == heads else 1 if kv_heads == 1 else 2)
    _set(tiny, "initializer_range", 0.2)  # large weights: a wrong token must change outputs far more than rounding does
    # Few layers, and the settings of those that are left.
    for layers in _LAYERS:
        if _is_number(tiny, layers):
            keep = _keep_layers(tiny, layers, per_kind, layer_configs)
            if layer_configs and layers == "num_hidden_layers":
                plain = config.to_dict()
                left = ((new, layer_configs[old]) for new, old in enumerate(keep) if old in layer_configs)
                tiny.per_layer_config = {i: _shrink_layer(values, plain, tiny) for i, values in left}
    return tiny


def _shrink_layer(values: Mapping[str, Any], config: Mapping[str, Any], tiny: PretrainedConfig) -> dict[str, Any]:
    """Return the tiny settings of a layer that differs from the others, in the same ratios where they are integers.

    Args:
        values: settings of the layer.
        config: settings of the other layers.
        tiny: tiny configuration, which the other layers use.
    """
    small = dict(values)
    for name, value in values.items():
        if config.get(name) and (name in _SIZES or name == "num_key_value_heads"):
            size = getattr(tiny, name)
            small[name] = size * value // config[name] if value % config[name] == 0 else size
    # As many key heads as query heads.
    if "num_key_value_heads" in values and values["num_key_value_heads"] == values.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    # A head that consists of a part with rotary embeddings and a part without.
    parts, merged = ("qk_nope_head_dim", "qk_rope_head_dim"), {**config, **values}
    if all(merged.get(name) for name in parts) and merged.get("head_dim") == sum(merged[name] for name in parts):
        small["head_dim"] = sum(small.get(name, getattr(tiny, name)) for name in parts)
    return small


def _is_number(config: PretrainedConfig, name: str) -> bool:
    # A property may raise anything: an attribute that differs between layers, or one that the family does not support.
    try:
        value = getattr(config, name, None)
    except Exception:
        return False
    return isinstance(value, int) and not isinstance(value, bool)


def _set(config: PretrainedConfig, name: str, value: Any) -> None:
    try:
        if hasattr(config, name):
            setattr(config, name, value)
    except (AttributeError, NotImplementedError):
        return


def _keep_layers(
    tiny: PretrainedConfig, layers: str, per_kind: int, layer_configs: Mapping[int, Mapping[str, Any]]
) -> list[int]:
    """Keep the first layers of each kind, a combination of all per-layer settings. Returns their old numbers."""
    n = getattr(tiny, layers)
    # Settings with one entry for each layer, such as layer_types, and lists of the numbers of some layers.
    lists = {name: list(value) for name, value in vars(tiny).items() if isinstance(value, list | tuple) and value}
    numbers = {
        name: value
        for name, value in lists.items()
        if ("layer" in name or "idx" in name) and len(set(value)) == len(value) and all(_is_below(i, n) for i in value)
    }
    per_layer = {name: value for name, value in lists.items() if len(value) == n and name not in numbers}
    kinds = [
        (
            str(layer_configs.get(i)),
            *(str(value[i]) for value in per_layer.values()),
            *(i in value for value in numbers.values()),
        )
        for i in range(n)
    ]
    keep = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < per_kind]
    keep = keep if len(keep) > 1 else list(range(min(2, n)))
    _set(tiny, layers, len(keep))
    for name, value in per_layer.items():
        setattr(tiny, name, [value[i] for i in keep])
    for name, value in numbers.items():
        setattr(tiny, name, [new for new, old in enumerate(keep) if old in value])
    return keep


def _is_below(value: Any, n: int) -> bool:
    return type(value) is int and value < n
