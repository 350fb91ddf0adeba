"""The gate of a SwiGLU layer (Shazeer, 2020), which saves its two inputs for the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``. Results and gradients are rounded as those of the two operations.

    Args:
        gate, up: ``[..., N]``, of one floating dtype.

    Returns:
        ``[..., N]``, in the same dtype.
    """
    out: Tensor = _SiluProduct.apply(gate, up)
    return out


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate) if ctx.needs_input_grad[0] else None
        grad_up = F.silu(gate).mul_(grads[0]) if ctx.needs_input_grad[1] else None
        return grad_gate, grad_up
