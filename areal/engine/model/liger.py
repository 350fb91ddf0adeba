"""Fused layers by the Triton kernels of Liger-Kernel, the extra ``liger``: RMSNorm, the gate of SwiGLU and rotary embedding.

The functions have the signatures and meanings of those of :mod:`areal.engine.model.fused_layers`, and fall back to them for dtypes that
Liger-Kernel rounds in another way.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from areal.engine.model import fused_layers
from areal.engine.model.fused_layers import FUSED, LayerFunctions


def liger_functions(model_type: str, device: torch.device) -> LayerFunctions:
    """Return the functions of Liger-Kernel.

    Args:
        model_type: model type of the configuration.
        device: device of the model.

    Raises:
        ValueError: the package is not installed, the device is not CUDA, or the layers of the model type are not supported.
    """
    option = "fsdp.layer_kernels = 'liger'"
    if model_type not in FUSED:
        raise ValueError(
            f"{option} with model_type = {model_type!r}: its families are {', '.join(sorted(FUSED))}; leave it out, or set "
            "fsdp.compile = True"
        )
    if device.type != "cuda":
        raise ValueError(f"{option} on device {device.type!r}: Liger's kernels need CUDA; set 'torch'")
    try:
        # Imported only if it is used: it loads Triton, which takes seconds.
        ops = importlib.import_module("liger_kernel.ops")
    except ImportError as error:
        raise ValueError(
            f"{option} without liger-kernel ({error}): pip install 'areal[liger]', or set 'torch'"
        ) from error
    return layer_functions(ops)


def layer_functions(ops: Any) -> LayerFunctions:
    """Return layer functions by the autograd functions of a module.

    Args:
        ops: ``liger_kernel.ops``.
    """

    def rms_norm(x: Tensor, weight: Tensor, eps: float, *, wide_weight: bool = False, offset: float = 0.0) -> Tensor:
        # Liger's result has the dtype of x; a wider weight widens ours.
        if x.dtype != weight.dtype:
            return fused_layers.rms_norm(x, weight, eps, wide_weight=wide_weight, offset=offset)
        # "llama" rounds normalised rows before it multiplies by the weight, "gemma" after that. Not in place: the gradient of the result may
        # be that of the residual stream, too.
        casting, in_place = "gemma" if wide_weight else "llama", False
        out: Tensor = ops.LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)
        return out

    def silu_product(gate: Tensor, up: Tensor) -> Tensor:
        # The backward writes the gradients over gate and up: it runs once for each forward.
        out: Tensor = ops.LigerSiLUMulFunction.apply(gate, up)
        return out

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        # Liger reads angles of both halves.
        if not q.dtype == k.dtype == cos.dtype or unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1]:
            return fused_layers.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        # Liger rotates in place. Selective checkpointing keeps results of matrix products, which would be rotated again.
        rotated: tuple[Tensor, Tensor] = ops.LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)
        return rotated

    return LayerFunctions(rms_norm, silu_product, rotary)
