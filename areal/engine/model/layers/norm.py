"""RMSNorm (Zhang and Sennrich, 2019) that saves its input and one number per row for the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, wide_weight: bool = False, offset: float = 0.0) -> Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * (offset + weight)`` over the last dimension.

    Statistics are computed in at least float32. On a GPU this is one kernel of PyTorch, which rounds to the dtype of ``x`` once, after the
    weight. Elsewhere the rounding is that of transformers' modules.

    Args:
        x: ``[..., N]``, of any floating dtype.
        weight: ``[N]``, of any floating dtype.
        eps: added to the mean of squares.
        wide_weight: multiply by the weight in at least float32, and round after that. Otherwise the normalised row is rounded to the dtype
            of ``x`` first.
        offset: added to the weight, in at least float32. Requires ``wide_weight``.

    Returns:
        ``[..., N]``, in the dtype of ``x``. Without ``wide_weight`` a wider weight widens it.
    """
    if not offset and _has_kernel(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps, wide_weight, offset)
    return out


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``F.rms_norm`` is one kernel. Elsewhere PyTorch composes it of small operations."""
    return x.is_cuda and x.dtype == weight.dtype


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, wide_weight: bool, offset: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rstd = _inverse_rms(x, eps, wide)
        ctx.save_for_backward(x, weight, rstd)
        ctx.wide_weight, ctx.offset = wide_weight, offset
        if wide_weight:
            return (x * rstd).mul_(_widened(weight, wide, offset)).to(x.dtype)
        return _times((x * rstd).to(x.dtype), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        wide, (needs_x, needs_weight) = rstd.dtype, ctx.needs_input_grad[:2]
        normed, grad = x * rstd, grads[0]
        grad_weight: Tensor | None = None
        if needs_weight and x.dtype == weight.dtype == wide and not ctx.offset:
            # Without rounding, the products for the gradient of the weight also give the row sums of the input's.
            # A row-major buffer: gradients may be transposed.
            products = torch.mul(grad, normed, out=grad.new_empty(x.shape))
            rows = products.view(-1, x.shape[-1])
            sums, grad_weight = rows @ weight, rows.sum(0)
            grad_normed = torch.mul(grad, weight, out=products)
        else:
            if ctx.wide_weight:
                grad, factors, scale = grad.to(wide), normed, _widened(weight, wide, ctx.offset)
            else:
                # The forward rounded the normalised rows before it multiplied by the weight.
                factors, scale = normed.to(x.dtype), weight
            if needs_weight:
                grad_weight = (grad * factors).flatten(0, -2).sum(0).to(weight.dtype)
            grad_normed = (grad * scale).to(factors.dtype).to(wide)
            sums = torch.linalg.vecdot(grad_normed, normed)
        if not needs_x:
            return None, grad_weight, None, None, None
        return _grad_x(grad_normed, normed, sums.view(rstd.shape), rstd).to(x.dtype), grad_weight, None, None, None


def _inverse_rms(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return ``1 / sqrt(mean(x ** 2) + eps)`` of each row, ``[..., 1]``."""
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
    return squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def _grad_x(grad_normed: Tensor, normed: Tensor, sums: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of the input, ``rstd * (g - y * mean(g * y))``, in the memory of ``g``.

    Args:
        grad_normed, normed: ``g`` and ``y``, the normalised rows and their gradient. ``[..., N]``.
        sums, rstd: ``sum(g * y)`` of each row, overwritten, and its inverse root mean square. ``[..., 1]``.
    """
    return grad_normed.addcmul_(normed, sums.div_(-normed.shape[-1])).mul_(rstd)


def _widened(weight: Tensor, dtype: torch.dtype, offset: float) -> Tensor:
    weight = weight.to(dtype)
    return weight + offset if offset else weight


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product, in place if the weight does not widen it."""
    return x.mul_(weight) if torch.promote_types(x.dtype, weight.dtype) == x.dtype else x * weight
