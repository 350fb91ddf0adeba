"""Derive Megatron-Core's model configuration from a Hugging Face configuration and a layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig

from areal.api.config import TrainEngineConfig, torch_dtype
from areal.api.parallel import ParallelDims
from areal.engine.megatron.model.float8 import check_float8, float8_fields
from areal.engine.megatron.model.layer_spec import has_transformer_engine
from areal.engine.megatron.model.rotary import RotaryAngles
from areal.engine.model.hub import experts_per_layer
from areal.utils import platform

LATENT = ("deepseek_v3",)
"""Families with multi-head latent attention, and experts chosen by sigmoid scores plus a bias."""
QK_NORM = ("qwen3", "qwen3_moe", *LATENT)
QKV_BIAS = ("qwen2",)
MOE = ("qwen3_moe", *LATENT)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MOE)
"""Values of ``model_type`` that the engine supports."""


def check_family(hf: PretrainedConfig) -> None:
    """Check that Megatron-Core builds a model exactly as transformers does.

    Raises:
        ValueError: names the field of ``config.json``, its value and the way out.
    """
    if hf.model_type not in FAMILIES:
        raise ValueError(
            f"model_type = {hf.model_type!r}: the Megatron engine builds {', '.join(FAMILIES)}; use an 'fsdp:' backend, "
            "or add the family (docs/adding-a-model-family.md)"
        )
    # Values of fields for which Megatron-Core computes the same.
    known = {"hidden_act": ("silu",), "attention_dropout": (0, 0.0, None), "mlp_bias": (False, None)}
    if hf.model_type not in QKV_BIAS:
        known["attention_bias"] = (False, None)
    for name, allowed in known.items():
        value = getattr(hf, name, None)
        if value not in allowed and value is not None:
            raise ValueError(
                f"{name} = {value!r} in config.json: the Megatron engine has only {allowed[0]!r}; use an 'fsdp:' backend"
            )
    if hf.model_type in LATENT:
        _check_latent(hf)


def _check_latent(hf: PretrainedConfig) -> None:
    """Check the fields for which Megatron-Core's latent attention and routing differ from transformers'."""
    chosen, limited = hf.num_experts_per_tok, _group_limit(hf)
    # Field, whether its value is not supported, and the supported values.
    for name, wrong, only in (
        ("rope_interleave", not hf.rope_interleave, "pairs side by side (True)"),
        ("norm_topk_prob", bool(hf.norm_topk_prob) != (chosen > 1), "True where num_experts_per_tok > 1"),
        ("topk_group", bool(limited) and chosen // hf.topk_group != 2, "half of num_experts_per_tok, or n_group"),
        ("num_key_value_heads", hf.num_key_value_heads != hf.num_attention_heads, "num_attention_heads"),
    ):
        if wrong:
            raise ValueError(
                f"{name} = {getattr(hf, name)!r} in config.json of a {hf.model_type!r}: the Megatron engine has only {only}; use an "
                "'fsdp:' backend"
            )


def check_layout(hf: PretrainedConfig, dims: ParallelDims, config: TrainEngineConfig) -> None:
    """Check that a model can be divided by a layout.

    Raises:
        ValueError: names the letter, the number that it must divide, and the way out.
    """
    if config.activation_checkpointing == "selective":
        raise ValueError(
            "activation_checkpointing = 'selective': the Megatron engine has 'none' and 'full'; choose one, or use an 'fsdp:' backend"
        )
    # Tensor parallelism splits heads and columns evenly.
    heads, kv_heads = hf.num_attention_heads, getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
    for what, number in (
        ("query heads", heads),
        ("key heads", kv_heads),
        ("feed-forward columns", hf.intermediate_size),
        *_latent_columns(hf),
    ):
        if number % dims.tp:
            raise ValueError(
                f"backend = '{dims}': t{dims.tp} does not divide the model's {number} {what}; choose a smaller t"
            )
    # Expert parallelism divides the experts of each layer, and expert tensor parallelism each expert.
    experts = experts_per_layer(hf)
    if dims.ep > 1 and (not experts or experts % dims.ep):
        raise ValueError(
            f"backend = '{dims}': e{dims.ep} does not divide the model's {experts} experts; choose another e"
        )
    if experts and dims.tp > 1 and not config.megatron.sequence_parallel:
        raise ValueError(f"backend = '{dims}': experts with t need megatron.sequence_parallel = True, and it is False")
    if experts and hf.moe_intermediate_size % dims.expert_tp:
        raise ValueError(
            f"backend = '{dims}': t{dims.expert_tp} of the experts does not divide moe_intermediate_size = "
            f"{hf.moe_intermediate_size}; write '(attn:…|ffn:…)' with a smaller t on the ffn side"
        )
    _check_stages(hf.num_hidden_layers, dims, config)
    check_float8(hf, dims, config)


def _latent_columns(hf: PretrainedConfig) -> list[tuple[str, int]]:
    if hf.model_type not in LATENT:
        return []
    queries = [("columns of q_a_proj", hf.q_lora_rank)] if hf.q_lora_rank else []
    return [*queries, ("columns of kv_a_proj_with_mqa", hf.kv_lora_rank + hf.qk_rope_head_dim)]


def _check_stages(layers: int, dims: ParallelDims, config: TrainEngineConfig) -> None:
    first, last = config.megatron.first_stage_layers, config.megatron.last_stage_layers
    ends = [depth for depth in (first, last) if depth is not None]
    if dims.pp == 1:
        if ends:
            raise ValueError(
                f"backend = '{dims}' has no pipeline: leave megatron.first_stage_layers and last_stage_layers out"
            )
        return
    # The first and last stage may have their own depth; the rest must divide evenly, also into virtual chunks.
    rest, stages = layers - sum(ends), dims.pp - len(ends)
    depths = [*ends, rest // stages] if stages else ends
    divides = rest % stages == 0 if stages else rest == 0
    if not divides or any(depth < dims.vpp or depth % dims.vpp for depth in depths):
        raise ValueError(
            f"backend = '{dims}': {layers} layers do not split over {dims.pp} stages of {dims.vpp} chunks with "
            f"megatron.first_stage_layers = {first} and last_stage_layers = {last}: set these so that the rest divides, or "
            "choose a smaller p or v"
        )


def transformer_config(hf: PretrainedConfig, dims: ParallelDims, config: TrainEngineConfig) -> TransformerConfig:
    """Return Megatron-Core's configuration of a model in a layout.

    Options that would give silently wrong results are fixed here.
    """
    dtype = torch_dtype(config.dtype)
    kind = MLATransformerConfig if hf.model_type in LATENT else TransformerConfig
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return kind(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
        kv_channels=head_dim,
        # Full heads are rotated: queries and keys are both scaled, so that the softmax scale gets the square.
        # Latent attention computes its own scale.
        softmax_scale=RotaryAngles(hf, head_dim).scaling ** 2 * head_dim**-0.5,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type in QKV_BIAS,
        qk_layernorm=hf.model_type in QK_NORM,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_backend=None,  # type: ignore[arg-type]  # any other writes environment variables
        # Weights come from files or from our own initialisation.
        perform_initialization=False,
        use_cpu_initialization=platform.accelerator() == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **_parallel(dims, config),
        **_latent_attention(hf),
        **_mixture_of_experts(hf, local=config.lora is not None),
        **float8_fields(config, experts=hf.model_type in MOE),
    )


def _parallel(dims: ParallelDims, config: TrainEngineConfig) -> dict[str, Any]:
    interleaved, on_gpu = dims.vpp > 1, platform.accelerator() == "cuda"
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": dims.vpp if interleaved else None,
        "context_parallel_size": dims.cp,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.expert_tp,
        "sequence_parallel": sequence_parallel(dims, config),
        "num_layers_in_first_pipeline_stage": config.megatron.first_stage_layers,
        "num_layers_in_last_pipeline_stage": config.megatron.last_stage_layers,
        # Shapes of messages are known without an exchange (StageCommunicator).
        "variable_seq_lengths": True,
        # Gradients are sums: neither the schedule nor the reduction divides anything.
        "calculate_per_token_loss": True,
        # Interleaving over two stages with batched sends gives wrong gradients without an error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Waiting for a message orders the streams. Megatron-Core would also block the host, for a bug of old releases of torch.
        "batch_p2p_sync": False,
        # Gloo may still read a freed output.
        "deallocate_pipeline_outputs": on_gpu,
        **(recompute if config.activation_checkpointing == "full" else {}),
        "deterministic_mode": config.deterministic,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }


def sequence_parallel(dims: ParallelDims, config: TrainEngineConfig) -> bool:
    """Return whether tensor-parallel ranks divide the tokens between their matrix products."""
    return dims.tp > 1 and config.megatron.sequence_parallel


def _latent_attention(hf: PretrainedConfig) -> dict[str, Any]:
    if hf.model_type not in LATENT:
        return {}
    rope = hf.rope_parameters
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        # Angles are ours (LatentAttention): these fields only determine the softmax scale.
        "rope_type": "rope",
        "rotary_scaling_factor": rope.get("factor", 1.0) if scaled else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0) if scaled else 0.0,
    }


def _mixture_of_experts(hf: PretrainedConfig, *, local: bool) -> dict[str, Any]:
    # Only this dispatcher supports messages of different shapes between stages, and Megatron-Core checks it for dense models, too.
    fields: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if hf.model_type not in MOE:
        return fields
    fields |= _sigmoid_router(hf) if hf.model_type in LATENT else _softmax_router(hf)
    return fields | {
        "num_moe_experts": experts_per_layer(hf),
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        # Balancing losses are terms of our loss, as sums: Megatron must not add gradients itself.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # For local layers, which adapters need, it would select Megatron-Core's legacy experts.
        "moe_grouped_gemm": has_transformer_engine() and not local,
        "moe_permute_fusion": False,
    }


def _softmax_router(hf: PretrainedConfig) -> dict[str, Any]:
    # As in transformers: every n-th layer has experts, except those listed as dense.
    sparse = [
        int(i not in (hf.mlp_only_layers or ()) and (i + 1) % hf.decoder_sparse_step == 0)
        for i in range(hf.num_hidden_layers)
    ]
    return {
        "moe_layer_freq": sparse,
        "moe_router_dtype": None,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
    }


def _sigmoid_router(hf: PretrainedConfig) -> dict[str, Any]:
    return {
        "moe_layer_freq": [int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)],
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid",
        # The bias is ours (RoutedTopK): Megatron-Core would update its bias at every step, over its global groups.
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        **_group_limit(hf),
    }


def _group_limit(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the limit on expert groups per token, empty if a token may use all groups."""
    if (hf.n_group or 1) == (hf.topk_group or 1):
        return {}
    return {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
