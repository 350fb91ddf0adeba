"""Which weights of each model family are split over tensor-parallel ranks, and which layouts fit a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
from areal.engine.fsdp import recurrent_tensors
from areal.engine.fsdp.tensor_parallel import ParallelStyle, TensorParallel
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.torch.pipeline_split import PassThrough

DENSE: Mapping[str, ParallelStyle] = {
    "model.embed_tokens": TensorParallel.embedding,
    "model.layers.*.input_layernorm": TensorParallel.norm,
    "model.layers.*.self_attn": TensorParallel.block,
    "model.layers.*.self_attn.q_proj": TensorParallel.columns,
    "model.layers.*.self_attn.[kv]_proj": TensorParallel.key_heads,
    "model.layers.*.self_attn.[qk]_norm": TensorParallel.norm,
    "model.layers.*.self_attn.o_proj": TensorParallel.rows,
    "model.layers.*.post_attention_layernorm": TensorParallel.norm,
    "model.layers.*.mlp": TensorParallel.block,
    "model.layers.*.mlp.gate_proj": TensorParallel.columns,
    "model.layers.*.mlp.up_proj": TensorParallel.columns,
    "model.layers.*.mlp.down_proj": TensorParallel.rows,
    "model.norm": TensorParallel.last_norm,
    "lm_head": TensorParallel.head,
}
"""Pre-norm decoders with gated MLPs and any number of key-value heads."""

DELTA_RULE: Mapping[str, ParallelStyle] = {**DENSE, "model.layers.*.linear_attn": recurrent_tensors.delta_rule}
"""The same decoders, in which some layers have the gated delta rule in place of attention."""

SHORT_CONVOLUTION: Mapping[str, ParallelStyle] = {
    "model.embed_tokens": TensorParallel.embedding,
    "model.layers.*.operator_norm": TensorParallel.norm,
    "model.layers.*.conv": recurrent_tensors.short_convolution,
    "model.layers.*.self_attn": TensorParallel.block,
    "model.layers.*.self_attn.q_proj": TensorParallel.columns,
    "model.layers.*.self_attn.[kv]_proj": TensorParallel.key_heads,
    "model.layers.*.self_attn.[qk]_layernorm": TensorParallel.norm,
    "model.layers.*.self_attn.out_proj": TensorParallel.rows,
    "model.layers.*.ffn_norm": TensorParallel.norm,
    "model.layers.*.feed_forward": TensorParallel.block,
    "model.layers.*.feed_forward.w[13]": TensorParallel.columns,
    "model.layers.*.feed_forward.w2": TensorParallel.rows,
    "model.embedding_norm": TensorParallel.last_norm,
    "lm_head": TensorParallel.head,
}
"""LFM2."""


def _mixer(parallel: TensorParallel, module: Any) -> None:
    (recurrent_tensors.mamba2 if hasattr(module, "conv1d") else TensorParallel.block)(parallel, module)


MAMBA2: Mapping[str, ParallelStyle] = {
    "model.embeddings": TensorParallel.embedding,
    "model.layers.*.norm": TensorParallel.norm,
    "model.layers.*.mixer": _mixer,
    "model.layers.*.mixer.q_proj": TensorParallel.columns,
    "model.layers.*.mixer.[kv]_proj": TensorParallel.key_heads,
    "model.layers.*.mixer.o_proj": TensorParallel.rows,
    "model.layers.*.mixer.up_proj": TensorParallel.columns,
    "model.layers.*.mixer.down_proj": TensorParallel.rows,
    "model.norm_f": TensorParallel.last_norm,
    "lm_head": TensorParallel.head,
}
"""Nemotron-H without experts."""

GEMMA: Mapping[str, ParallelStyle] = {**DENSE, "model.layers.*.p*_feedforward_layernorm": TensorParallel.norm}
"""Gemma 3, with norms after attention and MLP, too."""


def _behind_images(plan: Mapping[str, ParallelStyle], *towers: str) -> Mapping[str, ParallelStyle]:
    """Return the plan of a decoder behind a tower."""
    return {
        **{name.replace("model.", "model.language_model.", 1): style for name, style in plan.items()},
        **dict.fromkeys(towers, TensorParallel.tower),
    }


PLANS: Mapping[str, Mapping[str, ParallelStyle]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), DENSE),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_vl"), _behind_images(DENSE, "model.visual.**")),
    "qwen3_5_text": DELTA_RULE,
    "qwen3_5": _behind_images(DELTA_RULE, "model.visual.**"),
    "lfm2": SHORT_CONVOLUTION,
    "nemotron_h": MAMBA2,
    "gemma3_text": GEMMA,
    "gemma3": _behind_images(GEMMA, "model.vision_tower.**", "model.multi_modal_projector.**"),
}
"""Plan by model type. A plan lists every module with parameters, and the blocks around them, by patterns of dotted names."""

DIVIDED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5"), ("linear_num_key_heads", "linear_num_value_heads")),
    "lfm2": ("hidden_size",),
    "nemotron_h": ("mamba_num_heads", "n_groups"),
}
"""Numbers of the configuration that the ranks divide in recurrent layers, by model type."""


def check_plan(config: PretrainedConfig, dims: ParallelDims, *, packed: bool) -> None:
    """Check that a model can be split over the tensor-parallel ranks of a layout.

    Raises:
        ValueError: the family does not have a plan, or a number of its configuration does not fit the layout.
    """
    size = dims.tp
    if size == 1:
        return
    if config.model_type not in PLANS:
        raise ValueError(
            f"model type {config.model_type!r} has no tensor-parallel plan on the fsdp engine, which has some for "
            f"{', '.join(sorted(PLANS))}: leave t out, use the megatron engine, or add a plan to areal.engine.fsdp.tensor_plans"
        )
    # Divided tokens need a stream without rows.
    if not packed:
        raise ValueError(
            "fsdp.attention = 'rows' with t: tensor parallelism needs packed attention; leave one of the two out"
        )
    model_type, config = config.model_type, config.get_text_config()
    if "moe" in getattr(config, "layers_block_type", ()):
        raise ValueError(
            f"layers_block_type of {model_type!r} has 'moe': tensor parallelism on the fsdp engine has no experts; leave t out"
        )
    # Heads and columns are split evenly. Key-value heads may also be fewer than the ranks, if these divide by them.
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", *DIVIDED.get(model_type, ())):
        number = getattr(config, name)
        if number % size and not (name == "num_key_value_heads" and size % number == 0):
            raise ValueError(
                f"{name} = {number} does not divide over {size} tensor-parallel ranks: choose a t that divides it"
                + (", or a multiple of it" if name == "num_key_value_heads" else "")
            )
    _check_vocabulary(config, dims)


def _check_vocabulary(config: PretrainedConfig, dims: ParallelDims) -> None:
    """Check the split of the vocabulary, which may be uneven.

    Raises:
        ValueError: a rank would not have any row, or the columns of uneven rows cannot be sharded.
    """
    vocabulary, size = config.vocab_size, dims.tp
    if vocabulary % size == 0:
        return
    # All ranks but the last few have equally many rows.
    rows = -(-vocabulary // size)
    if (size - 1) * rows >= vocabulary:
        raise ValueError(
            f"vocab_size = {vocabulary} leaves a rank of {size} tensor-parallel ranks without rows: choose a smaller t"
        )
    # FSDP shards the columns of unevenly split rows, see parallelize().
    shards = dims.dp_shard * dims.cp
    if config.hidden_size % shards:
        raise ValueError(
            f"backend = '{dims}': vocab_size = {vocabulary} does not divide over {size} tensor-parallel ranks, and "
            f"hidden_size = {config.hidden_size} not over the {shards} ranks that shard each of its slices; "
            "choose a t that divides the first, or d * c that divides the second"
        )


def _matches(name: str, pattern: str) -> bool:
    """Return whether the parts of a dotted name match those of a pattern; a last ``**`` matches any number of parts."""
    names, patterns = name.split("."), pattern.split(".")
    if patterns[-1] == "**":
        patterns = patterns[:-1]
        names = names[: len(patterns)]
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def split_tensors(model: PackedCausalLM, mesh: DeviceMesh) -> None:
    """Split a model that :func:`check_plan` accepts, in place. The model may be on the meta device.

    Args:
        model: full model or one pipeline stage.
        mesh: mesh axis ``tp``.

    Raises:
        ValueError: the family's plan does not cover a parameter.
    """
    config = model.hf.config
    parallel, plan = TensorParallel(mesh, config.get_text_config().num_key_value_heads), PLANS[config.model_type]
    for name, module in model.hf.named_modules():
        for pattern, style in plan.items():
            if _matches(name, pattern) and not isinstance(module, PassThrough):
                style(parallel, module)
    # The value head is small: every rank computes it on all tokens.
    if model.value_head is not None:
        parallel.replicated(model.value_head)
    model.vocab_group = parallel.group
    # A parameter outside the plan would be wrong silently.
    missing = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missing:
        raise ValueError(
            f"the tensor-parallel plan of {config.model_type!r} leaves out {missing[0]}: add it to the plan"
        )
