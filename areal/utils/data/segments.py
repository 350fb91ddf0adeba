"""Sums and means over the sequences of a packed micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence. Differentiable. Does not wait for the device.

    Args:
        x: ``[T, ...]``. Half precision is summed, and returned, in float32; booleans in int64.
        cu_seqlens: integers ``[n + 1]``. Start of each sequence in ``T``, as in ``batch.cu_seqlens``.

    Returns:
        ``[n, ...]``. The sum is 0 for a sequence without tokens.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    elif x.dtype == torch.bool:
        x = x.long()
    n = len(cu_seqlens) - 1
    # Sequence of each token. With the output size, which is known here, repeat_interleave does not wait for the device.
    index = torch.repeat_interleave(torch.arange(n, device=x.device), cu_seqlens.diff().long(), output_size=len(x))
    return x.new_zeros((n, *x.shape[1:])).index_add(0, index, x)


def segment_mean(x: Tensor, cu_seqlens: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute the weighted mean over each sequence, ``sum(w * x) / sum(w)``. Differentiable. Does not wait for the device.

    Args:
        x: float ``[T, ...]``.
        cu_seqlens: integers ``[n + 1]``. Start of each sequence in ``T``.
        weights: ``[T]``, such as a loss mask. Defaults to 1 for each token.

    Returns:
        ``[n, ...]``. The mean is 0 for a sequence whose weights sum to 0.
    """
    w = torch.ones(len(x), dtype=x.dtype, device=x.device) if weights is None else weights.to(x.dtype)
    trailing = [1] * (x.dim() - 1)
    total = segment_sum(x * w.reshape(-1, *trailing), cu_seqlens)
    weight = segment_sum(w, cu_seqlens).reshape(-1, *trailing)
    # The division must not see a 0, even where its result is not used: its gradient would be NaN.
    return torch.where(weight != 0, total / weight.masked_fill(weight == 0, 1), 0)
