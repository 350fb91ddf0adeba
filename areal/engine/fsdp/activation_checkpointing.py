"""Activation checkpointing: what a layer's forward leaves for its backward, and what the backward computes again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from areal.api.config import ActivationCheckpointing

_aten = torch.ops.aten

SAVED_OPS = frozenset(
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


def recompute_layers(layers: Sequence[nn.Module], how: ActivationCheckpointing, fraction: float) -> None:
    """Let some layers compute activations again in the backward, in place.

    Args:
        how: ``"full"`` keeps a layer's input alone, ``"selective"`` also the results of :data:`SAVED_OPS`.
        fraction: of the layers, spread evenly.
    """
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = _selective_contexts
    for number, layer in enumerate(layers):
        if int((number + 1) * fraction) > int(number * fraction):
            layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    forward, again = create_selective_checkpoint_contexts(list(SAVED_OPS))
    return _SavedOpsOnly(forward), _SavedOpsOnly(again)


class _SavedOpsOnly(TorchDispatchMode):
    """Shows a mode only what is kept. Of other operations there may be more the second time: FSDP gathers the weights of a module within the
    layer in its hooks, if they are not there."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
