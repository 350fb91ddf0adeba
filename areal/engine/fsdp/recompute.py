"""Activation checkpointing: what a layer's forward leaves for its backward, and what the backward computes again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from areal.api.config import ActivationCheckpointing

_aten = torch.ops.aten

KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._grouped_mm.default,
        _aten._flash_attention_forward.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What is dear to compute again: matrix products and attention. Norms, activations, rotations and sums are cheap, and most of the memory."""


def recompute_layers(layers: Sequence[nn.Module], how: ActivationCheckpointing, share: float) -> None:
    """Let some layers compute activations again in the backward, in place.

    Args:
        how: ``"full"`` keeps a layer's input alone, ``"selective"`` also the results of :data:`KEPT`.
        share: of the layers, spread evenly.
    """
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for number, layer in enumerate(layers):
        if int((number + 1) * share) > int(number * share):
            layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
