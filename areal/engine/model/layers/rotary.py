"""Rotary embedding (Su et al., 2021) of queries and keys that saves the angles only: its backward is the inverse rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, as transformers' function of this name: the first half of a head is paired with the second.

    Args:
        q, k: ``[B, H, S, D]`` with ``D`` even, of any floating dtype. The number of heads may differ.
        cos, sin: ``[B, S, D]``, without gradient. Both halves contain the same angles.
        unsqueeze_dim: dimension of the heads.

    Returns:
        Rotated queries and keys. Wider angles widen them.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1).to(ctx.dtype), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` by the angles, or by their negatives with ``sign = -1``."""
    half = x.shape[-1] // 2
    out = x * cos
    first, second = out[..., :half], out[..., half:]
    if out.element_size() < 4:
        # Each product is rounded before the sum, as in transformers.
        first.sub_(x[..., half:] * sin[..., :half], alpha=sign)
        second.add_(x[..., :half] * sin[..., half:], alpha=sign)
    else:
        first.addcmul_(x[..., half:], sin[..., :half], value=-sign)
        second.addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out
