"""Which weights of each model family are split over tensor-parallel ranks, and which layouts fit a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
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

WITH_IMAGES: Mapping[str, ParallelStyle] = {
    **{name.replace("model.", "model.language_model.", 1): style for name, style in DENSE.items()},
    "model.visual.*": TensorParallel.tower,
}
"""The same decoders behind a vision tower."""

PLANS: Mapping[str, Mapping[str, ParallelStyle]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), DENSE),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_vl"), WITH_IMAGES),
}
"""Plan by model type. A plan lists every module with parameters, and the blocks around them."""


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
    config = config.get_text_config()
    # Heads and columns are split evenly. Key-value heads may also be fewer than the ranks, if these divide by them.
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
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
            if fnmatch.fnmatchcase(name, pattern) and not isinstance(module, PassThrough):
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
