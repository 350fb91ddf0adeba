"""What all losses do with numbers: the dtype they compute in, what stands outside the mask, and how a log-ratio is bounded."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""A log-ratio is clamped to ``[-20, 20]`` before ``exp``: ratios lie within 2e-9 and 5e8. Beyond the bound it has no gradient."""


def to_compute_dtype(x: Tensor) -> Tensor:
    """``x`` in float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def trained_positions(mask: Tensor) -> Tensor:
    """Where ``mask`` is not 0: bool, of its shape."""
    return mask != 0


def at_trained(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` where the mask is not 0, and exactly 0, without a gradient, elsewhere, whatever stands there.

    Filling comes before any arithmetic: a NaN that is multiplied by 0 is still a NaN, in the loss or in its gradient.

    Args:
        x: ``[T]`` or ``[T, K]``. mask: ``[T]``.

    Returns:
        Of the shape of ``x``, float32 or float64.
    """
    outside = (mask == 0).reshape(-1, *[1] * (x.dim() - 1))
    return to_compute_dtype(x).masked_fill(outside, 0.0)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``logprobs - old_logprobs`` at trained positions, 0 elsewhere; not clamped. ``old_logprobs`` has no gradient. All ``[T]``."""
    return at_trained(logprobs, mask) - at_trained(old_logprobs.detach(), mask)


def bounded(log_ratios: Tensor) -> Tensor:
    """``log_ratios`` clamped to :data:`LOG_RATIO_BOUND` on both sides."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def spread(per_sequence: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Give each token what its sequence has: from ``[n]`` to ``[T]``, differentiable, without a host read."""
    return torch.repeat_interleave(per_sequence, cu_seqlens.diff().long(), dim=0, output_size=tokens)
