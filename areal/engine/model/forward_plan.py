"""How an engine runs a model: packed sequences or one per row, and which head computes the logits.

A model whose layers would mix packed sequences runs ``rows`` instead: one sequence per row, with the model's own attention
and mask. If that is wrong, too, the model is refused. :func:`plan_forward` decides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

from areal.api.parallel import ParallelDims
from areal.engine.attention.huggingface import PACKED_ATTENTION
from areal.engine.model.hub import check_rope
from areal.engine.model.media import IMAGE_FAMILIES
from areal.engine.model.probe import probe

logger = logging.getLogger(__name__)

TESTED_FAMILIES = IMAGE_FAMILIES | {"deepseek_v3", "gemma3_text", "gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe"}
"""Model types whose packed results the tests compare with transformers. For others, a probe decides whether they are packed."""

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_PACKABLE_LAYERS = _ATTENTION_LAYERS | {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
"""Kinds of layers that may be packed. Whether those of a family keep sequences apart, its tiny copy shows."""

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


@dataclass(frozen=True)
class ForwardPlan:
    """How an engine runs a model.

    Attributes:
        packed: sequences packed end to end; otherwise one per row, with the model's own attention and mask.
        own_head: logits computed by the model's own code; otherwise the product with the weight of the output embedding.
    """

    packed: bool
    own_head: bool


def inspect_model(config: PretrainedConfig) -> tuple[str | None, bool]:
    """Return why a model would mix packed sequences (``None`` if it keeps them apart), and whether it needs its own head.

    :data:`TESTED_FAMILIES` are known. Of other models, a tiny copy is run; see :mod:`areal.engine.model.probe`.

    Raises:
        ValueError: the model cannot be trained on next tokens with any layout, such as an encoder-decoder or a model whose
            tokens see later ones, or a tiny copy shows that its numbers would be wrong.
    """
    _check_trainable(config)
    # Models that can be trained, but not packed, according to their configuration.
    declared = _declared_obstacle(config)
    if config.model_type in TESTED_FAMILIES:
        return declared, False
    # All other models: run a tiny copy and compare.
    result = probe(config, None if declared else PACKED_ATTENTION)
    faults = {
        "its numbers cannot be checked": result.runs,
        "after a later token changed": result.causal,
        "its logits are not reproduced by its own code after the decoder": result.head,
        "beside right padding": result.rows,
        "in training mode, without dropout": result.training,
    }
    for where, fault in faults.items():
        if fault:
            raise ValueError(f"model_type = {config.model_type!r} cannot be trained on next tokens: {where}, {fault}")
    return declared or result.packed, result.own_head


def _check_trainable(config: PretrainedConfig) -> None:
    """Raise if the configuration shows that no layout can train the model on next tokens."""
    if config.is_encoder_decoder:
        raise ValueError(f"model_type = {config.model_type!r} is an encoder-decoder; engines train decoder-only models")
    # Other values than these two, such as 'vision', do not concern text.
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError("use_bidirectional_attention is set: tokens would see the targets they predict; clear it")
    layerdrop = getattr(config.get_text_config(), "layerdrop", 0.0)
    if layerdrop:
        raise ValueError(f"layerdrop = {layerdrop}: every rank would skip other layers; set it to 0.0 in config.json")
    check_rope(config)


def _declared_obstacle(config: PretrainedConfig) -> str | None:
    """Return what excludes packing in a configuration: other components, a kind of layer, or dropout of attention weights."""
    if config.model_type in IMAGE_FAMILIES:
        config = config.get_text_config()
    if config.get_text_config() is not config:
        return f"model_type = {config.model_type!r} has components in addition to its language model"
    known = _ATTENTION_LAYERS if config.model_type in TESTED_FAMILIES else _PACKABLE_LAYERS
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        return f"its layer_types has {', '.join(others)}"
    rates = {name: getattr(config, name, None) for name in _DROPOUTS}
    dropout = next((f"{name} = {rate}" for name, rate in rates.items() if rate), None)
    return f"{dropout}, which packed attention has not (with 0 in its config.json it packs)" if dropout else None


def plan_forward(
    config: PretrainedConfig,
    requested: Literal["auto", "packed", "rows"],
    dims: ParallelDims,
    *,
    fp32_head: bool = False,
) -> ForwardPlan:
    """Choose how a model runs several sequences, packed or one per row, and which head computes its logits.

    Args:
        config: configuration of the model.
        requested: setting of the user. ``"auto"`` packs models that keep packed sequences apart, and logs a warning for others.
        dims: layout. Context parallelism needs packed attention; pipelines and tensor parallelism need a product with a weight
            as the head.
        fp32_head: whether to multiply by the head's weight in float32.

    Raises:
        ValueError: the model cannot be trained, or not as requested.
    """
    why, own_head = inspect_model(config)
    # Packed, if the model keeps sequences apart and the user does not want rows.
    if requested == "packed" and why:
        raise ValueError(f"attention = 'packed', but {config.model_type!r} would mix sequences: {why}; use 'auto'")
    packed = requested != "rows" and why is None
    # Otherwise rows, which context parallelism cannot slice.
    if not packed and dims.cp > 1:
        reason = why or "attention = 'rows' was asked for"
        raise ValueError(f"context parallelism over {dims.cp} ranks needs packed attention, but {reason}; use c1")
    # The model's own head needs the full model on each rank.
    if own_head and dims.pp * dims.tp > 1:
        raise ValueError(
            f"model_type = {config.model_type!r} computes logits by more than a product with a weight, which {dims} cannot "
            "split: leave p and t out"
        )
    if own_head and fp32_head:
        raise ValueError(
            f"fp32_head = True, but model_type = {config.model_type!r} computes logits by its own code, in dtype: set it to False"
        )
    if not packed and requested == "auto":
        logger.warning("%s runs one sequence per row, padded, as packed ones might mix: %s", config.model_type, why)
    return ForwardPlan(packed, own_head)
