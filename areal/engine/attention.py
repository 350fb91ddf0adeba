"""The packed attention that Hugging Face models run: registered with transformers under :data:`PACKED_ATTENTION`.

A model is built with ``attn_implementation=PACKED_ATTENTION`` and called with ``packed=layout``, ``attention_mask=None`` and
``use_cache=False``; transformers hands ``packed`` through to every attention layer. No mask function is registered under the
name, so transformers builds no mask: the layout says which tokens see each other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from areal.engine.context_parallel import AttentionLayout

PACKED_ATTENTION = "areal_packed"
"""Name of the attention implementation."""

_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that models hand to attention without a bearing on its result here. Any other is refused unless it is unset."""


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: AttentionLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        query, key, value: ``[1, Hq | Hkv, T, D | Dv]``, this rank's tokens.
        attention_mask: must be ``None``.
        packed: the layout, as it was passed to the model's forward.
        scaling: defaults to ``D ** -0.5``.
        sliding_window: a key is visible to a query less than this many positions behind it, and to itself.
        s_aux: attention sinks ``[Hq]``.

    Returns:
        ``[1, T, Hq, Dv]``, and no attention weights.

    Raises:
        ValueError: there is no layout, there is a mask or dropout, the model is not causal, or it asks for something that packed
            attention does not know. Each is named.
    """
    if packed is None:
        raise ValueError(
            f"{PACKED_ATTENTION!r} attention needs packed=AttentionLayout in the call of the model's forward"
        )
    _check_supported(
        attention_mask, dropout, getattr(module, "is_causal", True) if is_causal is None else is_causal, kwargs
    )
    if query.shape[0] != 1:
        raise ValueError(
            f"query has {query.shape[0]} rows: packed attention takes one row with all sequences end to end"
        )
    out = packed.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


def _check_supported(attention_mask: Tensor | None, dropout: float, is_causal: bool, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            "attention_mask: packed attention keeps sequences apart by its layout; pass attention_mask=None"
        )
    if dropout:
        raise ValueError(f"attention_dropout = {dropout}: packed attention has none; set it to 0 in the model's config")
    if not is_causal:
        raise ValueError(
            "is_causal = False: packed attention is causal; a bidirectional model cannot be trained with it"
        )
    unknown = sorted(name for name, value in kwargs.items() if name not in _HARMLESS and not _is_unset(value))
    if unknown:
        raise ValueError(
            f"packed attention does not know {', '.join(unknown)}, which the model passes; pack no sequences for it"
        )


def _is_unset(value: Any) -> bool:
    return value is None or value is False


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
