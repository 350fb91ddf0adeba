"""Packed attention for Hugging Face models, registered with transformers as :data:`PACKED_ATTENTION` and :data:`INVARIANT_ATTENTION`.

A model is built with ``attn_implementation=PACKED_ATTENTION`` and called with ``packed=layout``, ``attention_mask=None`` and
``use_cache=False``. transformers passes ``packed`` through to every attention layer. No mask function is registered under
that name, so that transformers builds no mask: the layout defines which tokens see each other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from areal.engine.attention.context_parallel import AttentionLayout, Kernel
from areal.engine.attention.invariant import invariant_attention
from areal.engine.attention.kernels import AttentionOptions, packed_attention

PACKED_ATTENTION = "areal_packed"
"""Name of the attention implementation."""

INVARIANT_ATTENTION = "areal_batch_invariant"
"""Name of the implementation whose bits do not depend on the packing."""

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
"""Arguments of attention that do not change its result here. Any other argument is refused unless it is unset."""


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
    kernel: Kernel = packed_attention,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute packed attention, with the signature that transformers calls.

    Args:
        module: the attention layer.
        query, key, value: ``[1, Hq | Hkv, T, D | Dv]``. This rank's tokens.
        attention_mask: must be ``None``.
        packed: layout that was passed to the model's forward.
        scaling: factor on ``q @ k``. Defaults to ``D ** -0.5``.
        dropout: must be 0.
        sliding_window: number of keys that a query sees, its own included. ``None``: all earlier keys.
        s_aux: ``[Hq]``. Attention sinks.
        softcap: bound of the logits, or ``None``.
        is_causal: must not be False.
        kernel: attention of one rank that has all tokens.
        kwargs: other arguments of the model. Arguments that could change the result are refused.

    Returns:
        ``[1, T, Hq, Dv]``, and ``None`` instead of attention weights.

    Raises:
        ValueError: the layout is missing, or the model passes a mask, dropout, ``is_causal=False`` or an argument that packed
            attention does not support. The error names it.
    """
    # Refuse everything that would change the result: nothing is ignored.
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

    # transformers has one row of [heads, tokens, dim]; the kernels take [tokens, heads, dim].
    out = packed.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            sinks=s_aux,
            softcap=softcap,
        ),
        kernel=kernel,
    )
    return out.unsqueeze(0), None


def _check_supported(attention_mask: Tensor | None, dropout: float, is_causal: bool, kwargs: dict[str, Any]) -> None:
    """Raise if a model passes an argument that packed attention does not support."""
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
    # Unknown arguments may belong to a newer kind of attention: refused, unless the model leaves them unset.
    unknown = sorted(name for name, value in kwargs.items() if name not in _HARMLESS and not _is_unset(value))
    if unknown:
        raise ValueError(
            f"packed attention does not know {', '.join(unknown)}, which the model passes; pack no sequences for it"
        )


def _is_unset(value: Any) -> bool:
    return value is None or value is False


# Not compiled: lengths of sequences are Python numbers here, so that every batch would compile another graph.
AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention_forward))
AttentionInterface.register(
    INVARIANT_ATTENTION, torch.compiler.disable(partial(packed_attention_forward, kernel=invariant_attention))
)
